"""From the parameters of a request to SamplingParams: every rule on a value, and the arithmetic of the context.

Knows token ids and numbers: not what the prompt says, nor how the answer is sent.
"""

import random
from collections.abc import Sized
from dataclasses import replace
from typing import Any, Protocol

from msgspec import Struct

from oscine.api.http.errors import APIError, invalid
from oscine.api.serving.parameters import MAX_TOP_LOGPROBS, SamplingFields, bounds_of
from oscine.types import SamplingParams

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_TOOLS = 1024
MAX_SALT = 1024  # characters
_INT64 = 1 << 63


def check(condition: bool, param: str, rule: str, value: object) -> None:
    if not condition:
        raise invalid(param, f"it must be {rule}, not {value!r}")


def at_most(most: int, given: Sized | None, param: str) -> None:
    count = len(given or ())
    if count > most:
        raise invalid(param, f"it may have {most} entries, not {count}")


def bounded(body: Struct, param: str) -> Any:
    """The parameter's value; None if it was not given. Raises APIError for one outside of its field's bounds."""
    value = getattr(body, param)
    if value is not None:
        low, high, is_open = bounds_of(type(body))[param]
        if is_open:
            check(low < value <= high, param, f"above {low:g} and at most {high:g}", value)
        else:
            check(low <= value <= high, param, f"between {low:g} and {high:g}", value)
    return value


def choices(body: SamplingFields) -> int:
    return bounded(body, "n") or 1


def stop_strings(stop: str | list[str] | None, param: str = "stop") -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    check(len(stops) <= MAX_STOPS, param, f"at most {MAX_STOPS} strings", len(stops))
    check(all(stops), param, "made of strings that are not empty", "")
    longest = max(map(len, stops), default=0)
    check(
        longest <= MAX_STOP_CHARACTERS, param, f"made of strings of at most {MAX_STOP_CHARACTERS} characters", longest
    )
    return stops


def _max_new_tokens(
    num_prompt_tokens: int, wanted: int | None, max_model_len: int, *, prompt: str, param: str, minimum: int
) -> int:
    """Tokens that may be generated: as many as wanted, or else all that the context has room for."""
    check(wanted is None or wanted >= minimum, param, f"at least {minimum}", wanted)
    least = max(wanted or 1, 1)
    total = num_prompt_tokens + least
    if total <= max_model_len:
        return max_model_len - num_prompt_tokens if wanted is None else wanted
    raise APIError(
        f"The context of this model holds {max_model_len} tokens, but {num_prompt_tokens} in '{prompt}' + {least} to "
        f"generate = {total}. Shorten the prompt or lower '{param}'.",
        param=prompt,
        code="context_length_exceeded",
    )


def _token_ids(param: str, ids: list[int] | dict[int, float] | None, vocab_size: int) -> None:
    for token_id in ids or ():
        check(0 <= token_id < vocab_size, param, f"made of token ids between 0 and {vocab_size - 1}", token_id)


def _logit_bias(bias: dict[int, float] | None, vocab_size: int) -> dict[int, float]:
    at_most(MAX_LOGIT_BIAS, bias, "logit_bias")
    _token_ids("logit_bias", bias, vocab_size)
    for value in (bias or {}).values():
        check(-100 <= value <= 100, "logit_bias", "made of values between -100 and 100", value)
    return bias or {}


def _seed(seed: int | None) -> int:
    if seed is None:
        return random.getrandbits(62)
    check(-_INT64 <= seed < _INT64, "seed", "a 64-bit integer", seed)
    return seed % _INT64


class Limits(Protocol):
    """What a model can do. See EngineInfo."""

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
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """How one sequence is sampled. `max_tokens` came in `param`, and `prompt` is the parameter with the prompt.

    `stop_ids` end a sequence unless `ignore_eos` is set. Raises APIError that names the parameter, for a prompt that
    leaves no room with the code `context_length_exceeded`.
    """
    most = _max_new_tokens(
        num_prompt_tokens, max_tokens, model.max_model_len, prompt=prompt, param=param, minimum=minimum
    )
    at_most(MAX_STOP_TOKEN_IDS, body.stop_token_ids, "stop_token_ids")
    salt, rule = body.cache_salt, f"a text of 1 to {MAX_SALT} characters"
    check(salt is None or 0 < len(salt) <= MAX_SALT, "cache_salt", rule, (salt or "")[:80])
    _token_ids("stop_token_ids", body.stop_token_ids, model.vocab_size)
    top_k, min_tokens = body.top_k or 0, body.min_tokens or 0
    check(-1 <= top_k < _INT64, "top_k", "at least 0 (0 or -1: off)", top_k)
    check(0 <= min_tokens <= most, "min_tokens", f"between 0 and max_tokens ({most})", min_tokens)
    temperature, top_p = bounded(body, "temperature"), bounded(body, "top_p")
    if top_p == 0:  # the smallest set of tokens holds only the most probable one
        temperature, top_p = 0.0, 1.0
    repetition, limit = bounded(body, "repetition_penalty"), MAX_TOP_LOGPROBS
    check(logprobs is None or 0 <= logprobs <= limit, "logprobs", f"between 0 and {limit}", logprobs)
    own_stops = () if body.ignore_eos else stop_ids
    return SamplingParams(
        max_tokens=most,
        min_tokens=min_tokens,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=max(top_k, 0),
        min_p=bounded(body, "min_p") or 0.0,
        presence_penalty=bounded(body, "presence_penalty") or 0.0,
        frequency_penalty=bounded(body, "frequency_penalty") or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        logit_bias=_logit_bias(body.logit_bias, model.vocab_size),
        seed=_seed(body.seed),
        stop_token_ids=tuple(dict.fromkeys((*own_stops, *(body.stop_token_ids or ())))),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def with_seed(params: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of choice number `choice` of `n`: the same but for the seed."""
    return replace(params, seed=(params.seed + choice) % _INT64) if choice else params


def priority(value: int | None) -> int:
    check(value is None or -(1 << 31) <= value < 1 << 31, "priority", "a 32-bit integer", value)
    return value or 0
