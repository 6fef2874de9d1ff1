"""From a request for a chat completion to its turns."""

from collections.abc import Collection
from dataclasses import replace

from oscine.api.common.errors import invalid
from oscine.api.common.work import run_in_thread
from oscine.api.serving import sampling
from oscine.api.serving.call import Call
from oscine.api.serving.formats import Form, asked_form, check_beside_calls, extensions
from oscine.api.serving.schemas import ChatCompletionRequest
from oscine.api.serving.service import Service
from oscine.api.turns.begin import Prepared, begin_turns
from oscine.api.turns.conversation import allowed_calls, conversation, is_called, leave_out
from oscine.api.turns.dialect import CHAT, Dialect
from oscine.api.turns.progress import Turn, usual_headroom
from oscine.chat.toolbox import Toolbox
from oscine.types import SamplingParams


async def chat_turns(
    service: Service,
    call: Call[ChatCompletionRequest],
    *,
    form: Form | None = None,
    toolbox: Toolbox | None = None,
    removed: Collection[str] = (),
    dialect: Dialect = CHAT,
    admitted: bool = False,
) -> list[Turn]:
    """The turns that a request asks for: one per choice.

    `form` is the answer's, if the body does not say it by its own parameters. `toolbox`, already entered: built-in
    tools that may be called. `removed`: functions that may no longer be called.
    `admitted`: they belong to an answer that has its places already.
    """
    body, model = call.body, call.model
    talk = await run_in_thread(lambda: conversation(body, service.date, dialect), call.size, call.caller.threads)
    talk = service.reasoning.restore(call.caller.name, talk)
    n = body.n or 1
    if not admitted:
        model.served.admission.check(n)  # before the prompt is made, which costs more
    lacking = [tool.type for tool in body.tools or () if not is_called(tool)]
    leave_out(lacking, len(body.tools or ()) - len(lacking), body.tool_choice)
    form = form or await run_in_thread(lambda: asked_form(body), call.size, call.caller.threads)
    calls = allowed_calls(body, tuple(tool for tool in talk.functions if tool.name not in removed))
    if toolbox is not None and calls.choice != "none":
        talk = replace(talk, namespaces=toolbox.namespaces)
        calls = replace(calls, recipients=toolbox.recipients)
    check_beside_calls(extensions(body), calls.choice)

    async def prepare() -> Prepared:
        prompt = await model.prompts.render(talk, call.size, dialect.prompt)
        params = _sampling_params(call, len(prompt), dialect)
        return prompt, params, _headroom(body, params.max_tokens, service.config.server.final_headroom)

    return await begin_turns(
        service,
        call,
        form,
        calls,
        prepare,
        toolbox=toolbox,
        n=n,
        stop=sampling.stop_strings(body),
        separator=dialect.separator,
        ignore_eos=bool(body.ignore_eos),
    )


def _headroom(body: ChatCompletionRequest, max_tokens: int, setting: int) -> int:
    """Tokens reserved for the answer, also by a thinking budget; `setting` is the server's --final-headroom."""
    wanted, budget = body.final_headroom, _thinking_budget(body)
    most = max_tokens - 1
    sampling.check((wanted or 0) <= most, "final_headroom", f"between 0 and {most}", wanted)
    kept = usual_headroom(setting, max_tokens) if wanted is None else wanted
    return kept if budget is None else max(kept, max_tokens - budget)


def _thinking_budget(body: ChatCompletionRequest) -> int | None:
    of_reasoning = body.reasoning.max_tokens if body.reasoning else None
    of_thinking = body.thinking.budget_tokens if body.thinking else None
    budgets = (body.thinking_token_budget, of_reasoning, of_thinking)
    return next((budget for budget in budgets if budget is not None), None)


def top_logprobs(body: ChatCompletionRequest) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None


def _sampling_params(call: Call[ChatCompletionRequest], num_prompt_tokens: int, dialect: Dialect) -> SamplingParams:
    body, model = call.body, call.model
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "it needs 'logprobs': true")
    newer = body.max_completion_tokens is not None
    return sampling.read(
        body,
        model.info,
        model.tokenizer.turn_end_ids,
        num_prompt_tokens,
        body.max_completion_tokens if newer else body.max_tokens,
        prompt=dialect.prompt,
        param=dialect.limit or ("max_completion_tokens" if newer else "max_tokens"),
        clipped=dialect.clipped,
        logprobs=top_logprobs(body),
    )
