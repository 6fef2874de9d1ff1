"""From the parameters of a request to SamplingParams: the rules that depend on the model, and the context's arithmetic.

parameters has the rules on single values.
"""

import random
from collections.abc import Iterable
from typing import Protocol

from oscine.api.common.errors import context_overflow, invalid
from oscine.api.serving.parameters import SamplingFields
from oscine.types import SamplingParams

INT64 = 1 << 63
_AS_GIVEN = (  # parameters that mean the same to the engine
    *("temperature", "top_p", "min_p", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def check(condition: bool, param: str, rule: str, value: object) -> None:
    if not condition:
        raise invalid(param, f"it must be {rule}, not {value!r}")


def stop_strings(body: SamplingFields) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _max_new_tokens(
    num_prompt_tokens: int, wanted: int | None, max_model_len: int, *, prompt: str, param: str, minimum: int
) -> int:
    """Tokens that may be generated: as many as wanted, or else all that the context has room for."""
    check(wanted is None or wanted >= minimum, param, f"at least {minimum}", wanted)
    least = max(wanted or 1, 1)
    if num_prompt_tokens + least <= max_model_len:
        return max_model_len - num_prompt_tokens if wanted is None else wanted
    raise context_overflow(num_prompt_tokens, max_model_len, prompt=prompt, limit=param, wanted=least)


def check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    wrong = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
    check(wrong is None, param, f"made of token ids between 0 and {vocab_size - 1}", wrong)


def _seed(seed: int | None) -> int:
    return random.getrandbits(62) if seed is None else seed % INT64


class Limits(Protocol):
    """The limits of a model. See EngineInfo."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


def read(
    body: SamplingFields,
    model: Limits,
    stop_ids: tuple[int, ...],
    num_prompt_tokens: int,
    max_tokens: int | None,
    *,
    prompt: str = "prompt",
    param: str = "max_tokens",
    minimum: int = 1,
    clipped: bool = False,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """How one sequence is sampled. `max_tokens` came in `param`, and `prompt` is the parameter with the prompt.
    `clipped`: a limit beyond the context ends there, and is no error.

    `stop_ids` end a sequence unless `ignore_eos` is set. Raises APIError that names the parameter, for a prompt that
    leaves no room with the code `context_length_exceeded`.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "it is for streamed answers")
    if clipped and max_tokens is not None:
        max_tokens = min(max_tokens, max(model.max_model_len - num_prompt_tokens, 1))
    most = _max_new_tokens(
        num_prompt_tokens, max_tokens, model.max_model_len, prompt=prompt, param=param, minimum=minimum
    )
    stop_token_ids = body.stop_token_ids or ()
    check_ids("stop_token_ids", stop_token_ids, model.vocab_size)
    check_ids("logit_bias", body.logit_bias or (), model.vocab_size)
    min_tokens = body.min_tokens or 0
    check(min_tokens <= most, "min_tokens", f"between 0 and max_tokens ({most})", min_tokens)
    given = {name: value for name in _AS_GIVEN if (value := getattr(body, name)) is not None}
    if body.top_p == 0:  # the smallest set of tokens holds only the most probable one
        given |= {"temperature": 0.0, "top_p": 1.0}
    own_stops = () if body.ignore_eos else stop_ids
    return SamplingParams(
        max_tokens=most,
        min_tokens=min_tokens,
        top_k=max(body.top_k or 0, 0),
        seed=_seed(body.seed),
        stop_token_ids=tuple(dict.fromkeys((*own_stops, *stop_token_ids))),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **given,
    )
