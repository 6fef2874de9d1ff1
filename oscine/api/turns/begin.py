"""The begin of a request's turns: their grammars, parsers and courses."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from oscine.api.common.work import run_in_thread
from oscine.api.serving.call import Call
from oscine.api.serving.formats import Calls, Form, constraint
from oscine.api.serving.service import Service
from oscine.api.turns.progress import ContinuationPolicy, Turn
from oscine.chat.grammar import header_grammar, text_grammar
from oscine.chat.harmony_parser import HarmonyParser
from oscine.chat.toolbox import Toolbox
from oscine.types import SamplingParams

Prepared = tuple[list[int], SamplingParams, int]  # prompt, sampling, and tokens reserved for the answer


async def begin_turns(
    service: Service,
    call: Call[Any],
    form: Form | None,
    calls: Calls,
    prepare: Callable[[], Awaitable[Prepared]],
    *,
    toolbox: Toolbox | None = None,
    n: int = 1,
    stop: Sequence[str] = (),
    separator: str = "",
    ignore_eos: bool = False,
) -> list[Turn]:
    """One turn per choice. Raises APIError for a form that cannot be enforced, and as `prepare` does.

    `form`: of the answer. `prepare` is called once the form is in order. `toolbox` runs built-in tools, if
    `calls` allows any. `separator` joins the texts of several messages of one kind.
    """
    model, caller, size = call.model, call.caller, call.size
    toolbox = toolbox if calls.recipients else None
    grammar = later = await constraint(form, calls, caller, size)
    if toolbox is not None and calls.choice == "required":  # one call is required, not one after each result
        later = await constraint(form, replace(calls, choice="auto"), caller, size)
    prompt, params, headroom = await prepare()
    final, headroom = None, 0 if calls.choice == "required" else headroom
    if form is not None and (headroom or toolbox is not None):
        final = await run_in_thread(partial(text_grammar, form.format), size, caller.threads)
    params = replace(params, grammar=grammar, headers=header_grammar(calls.tools, calls.recipients))
    parser = partial(
        HarmonyParser,
        model.tokenizer,
        stop,
        namespaces=() if toolbox is None else toolbox.names,
        separator=separator,
        functions=frozenset(tool.name for tool in calls.tools),
    )
    return [
        Turn(
            model,
            call.engine_request(prompt, params, i),
            parser(),
            ContinuationPolicy(headroom, final, later),
            toolbox=toolbox,
            ignore_eos=ignore_eos,
            remember=partial(service.reasoning.keep, caller.name) if calls.tools else None,
        )
        for i in range(n)
    ]
