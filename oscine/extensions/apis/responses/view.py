"""The parts of an item that a client sees: by default, and by `include`."""

import base64
import binascii
from collections.abc import Collection, Sequence
from typing import Any

from oscine.api.common.errors import invalid

Object = dict[str, Any]

OUTPUTS = "code_interpreter_call.outputs"
SOURCES = "web_search_call.action.sources"
RESULTS = "file_search_call.results"
LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"
_KNOWN = {
    *(OUTPUTS, SOURCES, RESULTS, LOGPROBS, SEALED_REASONING, "web_search_call.results"),
    *("message.input_image.image_url", "computer_call_output.output.image_url"),
}
_SEAL = "oscine-1:"  # marks texts of Oscine, as other servers have other texts


def included(names: Sequence[str] | None) -> frozenset[str]:
    """Raises APIError for an unknown name. Some known names ask for parts that no item here has."""
    for i, name in enumerate(names or ()):
        if name not in _KNOWN:
            raise invalid(f"include[{i}]", f"{name!r} is not one of {', '.join(sorted(_KNOWN))}")
    return frozenset(names or ())


def shown(item: Object, include: Collection[str]) -> Object:
    """The item itself, or a copy with more or fewer parts."""
    kind = item["type"]
    if kind == "code_interpreter_call" and OUTPUTS not in include:
        return {**item, "outputs": None}
    if kind == "file_search_call" and RESULTS not in include:
        return {**item, "results": None}
    if kind == "web_search_call" and SOURCES not in include and isinstance(action := item.get("action"), dict):
        return {**item, "action": _without(action, "sources")}
    if kind == "reasoning":
        content = item.get("encrypted_content")
        if SEALED_REASONING in include and item["status"] != "in_progress":
            content = content or sealed("".join(part.get("text") or "" for part in item.get("content") or ()))
        return {**_without(item, "encrypted_content"), **({} if content is None else {"encrypted_content": content})}
    return item


def _without(item: Object, name: str) -> Object:
    return {key: value for key, value in item.items() if key != name}


def sealed(text: str) -> str:
    """A text as `encrypted_content`: encoded, not encrypted, as the client may read and write the text anyway."""
    return _SEAL + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def unsealed(text: str) -> str | None:
    """The text in `encrypted_content`, for clients that send nothing else back; None if another server wrote it."""
    try:
        return base64.b64decode(text.removeprefix(_SEAL), validate=True).decode() if text.startswith(_SEAL) else None
    except (binascii.Error, UnicodeDecodeError):
        return None
