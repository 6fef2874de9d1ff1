"""Checks of the messages that an engine takes from other processes: no step may fail on one of them.

The API reports the mistakes of clients, with the names of their parameters. The bounds here are those of the engine. A
request that exceeds them is refused, and no other request is affected.
"""

import re
from collections.abc import Sequence, Sized

from oscine.engine.wire.messages import Outputs, Prefill, PrefillRefused, Submit, ToClient, ToEngine
from oscine.types import GenerationOutput, GenerationRequest, PrefillSource, SamplingParams

_LARGE = 1e6  # bound of values that change logits; far below the largest float32
_MAX_TOP = 128  # log-probabilities per position
_MAX_BIASES = 4096
_MAX_GRAMMAR = 4 << 20  # characters
_LONGEST_NAME = 512  # characters of ids and addresses
_LONGEST_SALT = 4096  # characters, with the name of a key
_SHORTEST_S, _LONGEST_S = 1e-9, 3600.0
_INT32, _INT64 = 1 << 31, 1 << 63
_RANGES: dict[str, tuple[float, float]] = {  # fields of SamplingParams, inclusive
    "max_tokens": (0, _INT32),
    "min_tokens": (0, _INT32),
    "temperature": (0, _LARGE),
    "top_p": (0, 1),
    "top_k": (0, _INT64 - 1),
    "min_p": (0, 1),
    "presence_penalty": (-_LARGE, _LARGE),
    "frequency_penalty": (-_LARGE, _LARGE),
    "repetition_penalty": (1e-30, _LARGE),
    "seed": (-_INT64, _INT64 - 1),
    "logprobs": (0, _MAX_TOP),
    "prompt_logprobs": (0, _MAX_TOP),
}
_ADDRESS = re.compile(r"tcp://[^\s/;]+:[0-9]{1,5}")
_INTERNAL = "\0"  # first character of the ids of the engine's own requests


class Checks:
    """The checks of one engine."""

    def __init__(self, vocab_size: int, max_model_len: int) -> None:
        self._vocab_size, self._max_model_len = vocab_size, max_model_len

    def refusal(self, message: ToEngine) -> ToClient | None:
        """The answer to a message that is refused; None for one that is accepted."""
        try:
            match message:
                case Submit():
                    self._request(message.request)
                case Prefill():
                    self._prefill(message)
        except ValueError as error:
            return _refusal(message, str(error))
        return None

    def _request(self, request: GenerationRequest) -> None:
        _name("request_id", request.request_id)
        self._tokens("prompt_token_ids", request.prompt_token_ids)
        self._tokens("generated_token_ids", request.generated_token_ids)
        self._sampling(request.sampling)
        _at_most("cache_salt", request.cache_salt, _LONGEST_SALT)
        _at_most("adapter", request.adapter, _LONGEST_NAME)
        if request.prefill is not None:
            _source(request.prefill)

    def _sampling(self, sampling: SamplingParams) -> None:
        for name, (low, high) in _RANGES.items():
            _between(name, getattr(sampling, name), low, high)
        bias = sampling.logit_bias
        _at_most("logit_bias", bias, _MAX_BIASES)
        self._tokens("logit_bias", list(bias))
        for value in bias.values():
            _between("logit_bias", value, -_LARGE, _LARGE)
        _ids("stop_token_ids", sampling.stop_token_ids, _INT32)  # harmony has a stop token past the vocabulary
        _at_most("grammar", sampling.grammar or "", _MAX_GRAMMAR)
        _at_most("headers", sampling.headers or "", _MAX_GRAMMAR)

    def _prefill(self, wanted: Prefill) -> None:
        _name("request_id", wanted.request_id)
        length = len(wanted.token_ids)
        _require(length < self._max_model_len, f"{length} tokens are too many for a context of {self._max_model_len}")
        self._tokens("token_ids", wanted.token_ids)
        _at_most("cache_salt", wanted.cache_salt, _LONGEST_SALT)
        _at_most("adapter", wanted.adapter, _LONGEST_NAME)

    def _tokens(self, name: str, ids: Sequence[int]) -> None:
        _ids(name, ids, self._vocab_size)


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise ValueError(rule)


def _between(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # NaN is not
        raise ValueError(f"{name} must be between {low:g} and {high:g}, not {value}")


def _at_most(name: str, given: Sized, most: int) -> None:
    if len(given) > most:
        raise ValueError(f"{name} has a length of {len(given)}; {most} are possible")


def _ids(name: str, ids: Sequence[int], end: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < end):
        raise ValueError(f"{name} must be between 0 and {end - 1}")


def _name(name: str, text: str) -> None:
    valid = 0 < len(text) <= _LONGEST_NAME and not text.startswith(_INTERNAL)
    _require(valid, f"{name} must have 1 to {_LONGEST_NAME} characters, the first of them a letter or a digit")


def _source(source: PrefillSource) -> None:
    _at_most("prefill.replica", source.replica, _LONGEST_NAME)
    _at_most("prefill.address", source.address, _LONGEST_NAME)
    _require(_ADDRESS.fullmatch(source.address) is not None, "prefill.address must be tcp://HOST:PORT")
    _between("prefill.min_tokens", source.min_tokens, 0, _INT64)
    _between("prefill.timeout_s", source.timeout_s, _SHORTEST_S, _LONGEST_S)


def _refusal(message: ToEngine, error: str) -> ToClient:
    if isinstance(message, Prefill):
        return PrefillRefused(message.request_id, error)
    assert isinstance(message, Submit)
    return Outputs([GenerationOutput(message.request.request_id, finish_reason="error", error=error)], None)
