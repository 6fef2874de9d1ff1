"""From the parameters of a request to SamplingParams: every rule on a value, and the arithmetic of the context.

Knows token ids and numbers: not what the prompt says, nor how the answer is sent.
"""

import random
from collections.abc import Sized
from dataclasses import replace

from oscine.api.http.errors import APIError, invalid
from oscine.api.serving.parameters import MAX_CHOICES, MAX_TOP_LOGPROBS, SamplingFields
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


def _ranged(param: str, value: float | None, low: float, high: float, default: float) -> float:
    if value is None:
        return default
    check(low <= value <= high, param, f"between {low:g} and {high:g}", value)
    return value


def choices(n: int | None) -> int:
    check(n is None or 1 <= n <= MAX_CHOICES, "n", f"between 1 and {MAX_CHOICES}", n)
    return n or 1


def stop_strings(stop: str | list[str] | None, param: str = "stop") -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    check(len(stops) <= MAX_STOPS, param, f"at most {MAX_STOPS} strings", len(stops))
    check(all(stops), param, "made of strings that are not empty", "")
    longest = max(map(len, stops), default=0)
    check(
        longest <= MAX_STOP_CHARACTERS, param, f"made of strings of at most {MAX_STOP_CHARACTERS} characters", longest
    )
    return stops


def max_new_tokens(
    prompt_tokens: int,
    asked: int | None,
    max_model_len: int,
    *,
    prompt: str,
    param: str = "max_tokens",
    minimum: int = 1,
) -> int:
    """Tokens that may be generated: as many as asked for, or else all that the context has room for.

    `prompt` and `param` name what the prompt and the number came in. Raises APIError `context_length_exceeded`.
    """
    check(asked is None or asked >= minimum, param, f"at least {minimum}", asked)
    wanted = max(asked or 1, 1)
    if prompt_tokens + wanted <= max_model_len:
        return max_model_len - prompt_tokens if asked is None else asked
    raise APIError(
        f"The context of this model holds {max_model_len} tokens, but {prompt_tokens} in '{prompt}' + {wanted} to "
        f"generate = {prompt_tokens + wanted}. Shorten the prompt or lower '{param}'.",
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


def sampling_params(
    request: SamplingFields,
    *,
    max_tokens: int,
    vocab_size: int,
    model_stop_ids: tuple[int, ...],
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Raises APIError that names the parameter. `model_stop_ids` end a sequence unless `ignore_eos` is set."""
    at_most(MAX_STOP_TOKEN_IDS, request.stop_token_ids, "stop_token_ids")
    salt, rule = request.cache_salt, f"a text of 1 to {MAX_SALT} characters"
    check(salt is None or 0 < len(salt) <= MAX_SALT, "cache_salt", rule, (salt or "")[:80])
    _token_ids("stop_token_ids", request.stop_token_ids, vocab_size)
    top_k = request.top_k or 0
    check(-1 <= top_k < _INT64, "top_k", "at least 0 (0 or -1: off)", top_k)
    min_tokens = request.min_tokens or 0
    check(0 <= min_tokens <= max_tokens, "min_tokens", f"between 0 and max_tokens ({max_tokens})", min_tokens)
    temperature = _ranged("temperature", request.temperature, 0.0, 2.0, 1.0)
    top_p = _ranged("top_p", request.top_p, 0.0, 1.0, 1.0)
    if top_p == 0:  # the smallest set of tokens holds only the most probable one
        temperature, top_p = 0.0, 1.0
    repetition = request.repetition_penalty
    check(repetition is None or 0 < repetition <= 100, "repetition_penalty", "above 0 and at most 100", repetition)
    check(
        logprobs is None or 0 <= logprobs <= MAX_TOP_LOGPROBS, "logprobs", f"between 0 and {MAX_TOP_LOGPROBS}", logprobs
    )
    own_stops = () if request.ignore_eos else model_stop_ids
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        min_p=_ranged("min_p", request.min_p, 0.0, 1.0, 0.0),
        presence_penalty=_ranged("presence_penalty", request.presence_penalty, -2.0, 2.0, 0.0),
        frequency_penalty=_ranged("frequency_penalty", request.frequency_penalty, -2.0, 2.0, 0.0),
        repetition_penalty=1.0 if repetition is None else repetition,
        logit_bias=_logit_bias(request.logit_bias, vocab_size),
        seed=_seed(request.seed),
        stop_token_ids=tuple(dict.fromkeys((*own_stops, *(request.stop_token_ids or ())))),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def with_seed(params: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of choice number `choice` of `n`: the same but for the seed."""
    return replace(params, seed=(params.seed + choice) % _INT64) if choice else params


def priority(value: int | None) -> int:
    check(value is None or -(1 << 31) <= value < 1 << 31, "priority", "a 32-bit integer", value)
    return value or 0
