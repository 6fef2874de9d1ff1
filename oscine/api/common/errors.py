"""Errors in the form of each API. OpenAI's is {"error": {"message", "type", "param", "code"}}."""

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

ANTHROPIC_PATH = "/v1/messages"  # whose clients read another form of errors
CONTEXT_OVERFLOW = "context_length_exceeded"  # the code that clients know
TEXT_PATHS = ("/api", "/v2")  # of Ollama and of the Open Inference Protocol
_ANTHROPIC_OVERLOADED = 529
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    _ANTHROPIC_OVERLOADED: "overloaded_error",
}
_LONGEST_HEAD, _LONGEST_TAIL = 800, 200  # characters of a message; values of clients in it may have any length
RETRY_AFTER_S = 1.0  # told to a client if no better estimate is known


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    error: ErrorDetail


class AnthropicErrorDetail(Struct):
    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class AnthropicError(Struct):
    type: Literal["error"]
    error: AnthropicErrorDetail


class ErrorText(Struct):
    """As Ollama and Triton Inference Server have it."""

    error: str


class APIError(Exception):
    """An error that becomes the response of a request, or an event of a stream that has begun. Its message is for the
    client."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        details: dict[str, Any] | None = None,
        to_anthropic: str | None = None,
    ) -> None:
        """`details`: a field of some errors, read by Anthropic's clients. `to_anthropic`: the message for them."""
        message = _one_line(message)
        super().__init__(message)
        self.message, self.status, self.type, self.param, self.code = message, status, type, param, code
        self.headers, self.details, self.to_anthropic = headers or {}, details, to_anthropic

    def body(self) -> bytes:
        return msgspec.json.encode(Error(ErrorDetail(self.message, self.type, self.param, self.code)))

    def anthropic_body(self) -> bytes:
        usual = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(self.anthropic_status, usual)
        details = UNSET if self.details is None else self.details
        message = self.to_anthropic or self.message
        return msgspec.json.encode(AnthropicError("error", AnthropicErrorDetail(kind, message, details)))

    def text_body(self) -> bytes:
        return msgspec.json.encode(ErrorText(self.message))

    @property
    def anthropic_status(self) -> int:
        return _ANTHROPIC_OVERLOADED if self.code == "overloaded" else self.status


def _one_line(text: str) -> str:
    """Without its middle if it is too long, and with escapes for what cannot be printed."""
    if len(text) > _LONGEST_HEAD + _LONGEST_TAIL:
        text = f"{text[:_LONGEST_HEAD]}...{text[-_LONGEST_TAIL:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def invalid(param: str, why: str) -> APIError:
    """A parameter whose value cannot be used; `param` is its path in the body."""
    return APIError(f"Invalid value for '{param}': {why}.", param=param)


def unsupported(param: str, why: str = "it is not supported") -> APIError:
    """A parameter that would change the answer and cannot be honoured."""
    return APIError(f"Invalid value for '{param}': {why}.", param=param, code="unsupported_parameter")


def context_overflow(
    num_prompt_tokens: int, max_model_len: int, *, prompt: str, limit: str = "", wanted: int = 0, whole: bool = True
) -> APIError:
    """A prompt that does not fit the context, alone or with the tokens `wanted` after it.

    `prompt` and `limit` are the parameters of the two. `whole`: whether the whole prompt was counted. Clients search
    the message for these words. Then some compact their conversation, and some ask for fewer tokens. Where no prompt
    would fit beside `wanted`, that is the parameter at fault.
    """
    is_limit_at_fault = bool(limit) and num_prompt_tokens < max_model_len <= wanted
    found = f"{num_prompt_tokens}{'' if whole else ' or more'} in '{prompt}'"
    if num_prompt_tokens >= max_model_len:  # fewer tokens after it do not help
        most = min(max_model_len, num_prompt_tokens - 1)
        uncounted = "" if whole else " (or more: its tokens were not counted further)"
        to_anthropic = f"prompt is too long: {num_prompt_tokens} tokens > {most} maximum{uncounted}"
        wanted, limit = int(num_prompt_tokens == max_model_len), ""
    else:
        to_anthropic = (
            f"input length and `max_tokens` exceed context limit: {num_prompt_tokens} + {wanted} > {max_model_len}, "
            "decrease input length or `max_tokens` and try again"
        )
    more = f" + {wanted} to generate = {num_prompt_tokens + wanted}" if wanted else ""
    lower = f" or lower '{limit}'" if limit else ""
    beside, remedy = "", f"shorten the prompt{lower}"
    if is_limit_at_fault:
        beside, remedy = f"beside '{limit}' ", f"lower '{limit}' to {max_model_len - num_prompt_tokens} or less"
    message = (
        f"This model's maximum context length is {max_model_len} tokens, and {beside}the prompt is too long: "
        f"{found}{more}; {remedy}."
    )
    param = limit if is_limit_at_fault else prompt
    return APIError(message, param=param, code=CONTEXT_OVERFLOW, to_anthropic=to_anthropic)


def not_found(message: str, code: str, param: str | None = None) -> APIError:
    return APIError(message, status=404, param=param, code=code)


def retry_after(seconds: float | None) -> dict[str, str]:
    """The header: whole seconds, one at least."""
    return {"Retry-After": str(max(1, math.ceil(RETRY_AFTER_S if seconds is None else seconds)))}


def unavailable(message: str, *, code: str = "unavailable", retry_after_s: float | None = None) -> APIError:
    """The server cannot take the request now. The same request may succeed later: after `retry_after_s`, if that is
    known."""
    headers = retry_after(retry_after_s)
    return APIError(message, status=503, type="service_unavailable_error", code=code, headers=headers)


def internal(message: str = "The server failed while it handled this request.") -> APIError:
    return APIError(message, status=500, type="internal_server_error", code="internal_error")


_AT = re.compile(r"(?P<what>.*) - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)
_FIELD = re.compile(r"required field `(?P<name>[^`]*)`")
_BOUND = re.compile(r"Expected `\w+`(?P<length> of length)? (?P<sign>[<>]=?) (?P<limit>\S+)")
_SIGNS = {"<": "less than", "<=": "at most", ">": "more than", ">=": "at least"}


def from_validation(
    error: msgspec.ValidationError, where: str = "", choices: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> APIError:
    """A body that is JSON but not the request that its endpoint takes: names the parameter by its path.

    `where` is the path of what was decoded, if that was a part of the body. `choices` are the values that fields of
    these names may have.
    """
    text = str(error)
    match = _AT.match(text)
    what, path = (match["what"].replace(" | null", ""), match["path"]) if match else (text, "")
    if bound := _BOUND.fullmatch(what):
        of, limit = "its length" if bound["length"] else "it", bound["limit"].removesuffix(".0")
        what = f"{of} must be {_SIGNS[bound['sign']]} {limit}"
        path = path.removesuffix("[...]")  # a value of an object with any keys
    if missing := _FIELD.search(what):
        path = f"{path}.{missing['name']}".lstrip(".")
        what = "it is required"
    path = path if not where else f"{where}{path}" if path.startswith("[") else f"{where}.{path}".rstrip(".")
    if values := choices.get(path.rpartition(".")[2]):
        what += f". Choose one of {', '.join(values)}"
    return invalid(path, what) if path else APIError(f"Invalid request: {what}.")
