"""Converts requests of Dynamo's frontend to requests of the engine, and outputs to the chunks that it expects.

Every rule on a value is the API's own. This module does not import Dynamo.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from oscine.api.common.errors import unsupported
from oscine.api.serving import formats, sampling
from oscine.api.serving.formats import Calls, extensions, only_form
from oscine.api.serving.parameters import refuse
from oscine.api.serving.schemas import CompletionRequest, convert
from oscine.chat.grammar import JsonFormat
from oscine.chat.messages import FunctionTool
from oscine.chat.tokenizer import Tokenizer
from oscine.types import GenerationOutput, GenerationRequest, TokenLogprobs

_PLAIN = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "use_beam_search", "allowed_token_ids"),
)
_NAMESPACE = re.compile(r"namespace functions \{\n(.*?)\} // namespace functions", re.DOTALL)
_FUNCTION = re.compile(r"^type ([\w-]+) = ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The limits that requests are checked against."""

    tokenizer: Tokenizer
    max_model_len: int  # tokens, prompt and generated together
    vocab_size: int


async def generation_request(asked: Mapping[str, Any], request_id: str, model: ModelFacts) -> GenerationRequest:
    """Raises APIError that names the parameter, or says why the prompt cannot be used."""
    _check_supported(asked)
    prompt: list[int] = [*asked["token_ids"]]
    sampling.check(bool(prompt), "prompt", "at least one token", prompt)
    for extreme in (min(prompt), max(prompt)):
        known = 0 <= extreme < model.vocab_size
        sampling.check(known, "prompt", f"made of token ids from 0 to below {model.vocab_size}", extreme)
    fields = _sampling_fields(asked)
    refuse(fields)
    params = sampling.read(
        fields,
        model,
        _own_stop_ids(asked),
        len(prompt),
        fields.max_tokens,
        logprobs=fields.logprobs,
    )
    grammar = await _grammar(asked, fields, prompt, model.tokenizer)
    return GenerationRequest(request_id, prompt, replace(params, grammar=grammar), fields.priority or 0)


def prefill_request(request: GenerationRequest) -> GenerationRequest:
    """The same prompt, computed only for its pages."""
    params = replace(request.sampling, max_tokens=1, min_tokens=0, logprobs=None, grammar=None)
    return replace(request, sampling=params)


class Chunks:
    """The outputs of one request as the chunks of its stream."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._num_cached_tokens = 0

    def chunk(self, output: GenerationOutput) -> dict[str, Any]:
        self._num_tokens += len(output.token_ids)
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        chunk: dict[str, Any] = {"token_ids": output.token_ids, "index": 0}
        if output.logprobs is not None:
            chunk["log_probs"] = [entry.logprob for entry in output.logprobs]
            chunk["top_logprobs"] = [_ranked(entry) for entry in output.logprobs]
        if output.finish_reason is not None:
            chunk |= {"finish_reason": output.finish_reason, "completion_usage": self._usage()}
        return chunk

    def handoff(self, output: GenerationOutput, prefill: Mapping[str, Any]) -> dict[str, Any]:
        """The last chunk of a prompt that was computed for another worker, with `prefill` for that worker."""
        return self.chunk(replace(output, token_ids=[])) | {"disaggregated_params": dict(prefill)}

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }


def _ranked(entry: TokenLogprobs) -> list[dict[str, Any]]:
    """Log-probabilities by rank. The frontend has the vocabulary, and fills in the texts."""
    return [
        {"rank": rank, "token_id": token_id, "token": None, "logprob": logprob}
        for rank, (token_id, logprob) in enumerate(entry.top, 1)
    ]


def _group(asked: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    group: Mapping[str, Any] | None = asked.get(name)
    return group or {}


def _check_supported(asked: Mapping[str, Any]) -> None:
    """Refuses unsupported parameters that would change the answer; the frontend accepts some of them."""
    options = _group(asked, "sampling_options")
    for param in ("n", "best_of"):
        if (options.get(param) or 1) > 1:
            raise unsupported(param, "a worker gives one choice per request")
    if options.get("bad_words_token_ids"):
        raise unsupported("bad_words")
    if _group(asked, "stop_conditions").get("max_thinking_tokens") is not None:
        raise unsupported("max_thinking_tokens")
    if asked.get("multi_modal_data"):
        raise unsupported("messages", "gpt-oss takes text alone")
    for nvext in (_group(asked, "nvext"), _group(_group(asked, "extra_args"), "nvext")):
        if nvext.get("cache_salt"):
            raise unsupported("cache_salt", "prefixes are shared by all that a worker serves")


def _sampling_fields(asked: Mapping[str, Any]) -> CompletionRequest:
    options, stop = _group(asked, "sampling_options"), _group(asked, "stop_conditions")
    guided = _group(options, "guided_decoding")
    if guided.get("structural_tag") is not None:
        raise unsupported("structural_tag")
    fields = {
        **{name: options.get(name) for name in _PLAIN},
        **{name: stop.get(name) for name in ("max_tokens", "ignore_eos", "stop_token_ids")},
        **{f"guided_{name}": guided.get(name) for name in ("json", "regex", "choice", "grammar")},
        "min_tokens": _min_tokens(stop),
        **{name: _group(asked, "output_options").get(name) for name in ("logprobs", "prompt_logprobs")},
        "prompt": "",  # its tokens are read elsewhere
        "priority": -(_group(asked, "routing").get("priority") or 0),  # Dynamo's: higher runs sooner
    }
    return convert(fields, CompletionRequest, "")


def _min_tokens(stop: Mapping[str, Any]) -> int | None:
    """When a request migrates, the frontend subtracts the generated tokens from max_tokens only."""
    least, most = stop.get("min_tokens"), stop.get("max_tokens")
    return least if least is None or most is None else min(least, most)


def _own_stop_ids(asked: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a turn. The frontend shows none of them but `<|call|>`, which its parser of calls needs."""
    stop = _group(asked, "stop_conditions")
    return (*(stop.get("stop_token_ids_hidden") or ()), *(stop.get("stop_token_ids_visible") or ()))


async def _grammar(
    asked: Mapping[str, Any], fields: CompletionRequest, prompt: list[int], tokenizer: Tokenizer
) -> str | None:
    """Raises APIError for a form that cannot be enforced.

    The frontend sends the schema of the JSON that it will read. That is the answer or, if a call is required, an array
    of calls or the arguments of one. gpt-oss writes all of these within harmony's envelope.
    """
    form = only_form([*extensions(fields)])
    if form is None:
        return None
    opening = [tokenizer.start, *tokenizer.encode("assistant")]
    if prompt[-len(opening) :] != opening:
        return await formats.text_constraint(form)
    functions = _functions(asked, prompt, tokenizer)
    if functions and asked.get("require_reasoning") and isinstance(form.format, JsonFormat):
        return await _calls(form.format.schema, functions)
    tools = tuple(FunctionTool(name) for name in functions)
    return await formats.constraint(form, Calls(tools))


def _functions(asked: Mapping[str, Any], prompt: list[int], tokenizer: Tokenizer) -> list[str]:
    """The functions that may be called; only the prompt lists them."""
    if tokenizer.call not in (_group(asked, "stop_conditions").get("stop_token_ids_visible") or ()):
        return []
    declared = _NAMESPACE.search(tokenizer.decode(prompt))
    return _FUNCTION.findall(declared[1]) if declared else []


async def _calls(schema: Mapping[str, Any], functions: list[str]) -> str | None:
    """The required calls. If a function is named, only its parameters are known, and the model chooses the name."""
    try:
        calls = [call["properties"] for call in schema["items"]["anyOf"]]
        tools = [FunctionTool(call["name"]["enum"][0], parameters=call["parameters"]) for call in calls]
        parallel = schema.get("maxItems") != 1
    except (KeyError, IndexError, TypeError):
        tools, parallel = [FunctionTool(name, parameters=dict(schema)) for name in functions], False
    return await formats.constraint(None, Calls(tuple(tools), "required", parallel))
