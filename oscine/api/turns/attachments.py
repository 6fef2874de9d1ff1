"""What is not text in a conversation: a text in the place of a picture or a file says what was there.

The result of a tool stays in its conversation, so none is refused for what it shows. The same holds for calls of tools
that a vendor's servers run. Documents that are text are read as text.
"""

import base64
import json
import mimetypes
import re
from binascii import a2b_qp
from collections.abc import Iterable, Mapping
from typing import Any

from oscine.api.common.errors import invalid
from oscine.api.serving.schemas import not_read

Part = Mapping[str, Any]  # of a message or of a result, in any API's form

_TEXTS = {"refusal": "refusal", **dict.fromkeys(("text", "input_text", "output_text", "reasoning_text"), "text")}
_INNER = ("source", "file", "image_url", "input_audio", "video_url")  # fields that may hold the fields of a part
_CONTENTS = ("data", "file_data", "url", "image_url", "file_url", "image")
_NAMES = ("filename", "title", "name", "file_id", "id")
_READ_AS_TEXT = ("text/", "application/json", "application/xml")
_FOUND = ("title", "url", "text", "stdout", "stderr", "error_code")  # fields of what a vendor's tool gives
_NO_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")
_LONGEST_NAME = 200  # characters


def result_text(content: str | Iterable[Part] | None, where: str) -> str:
    """A result as one text; its parts are joined without a separator. `where`: path of the content.

    Raises APIError for a part of text without its text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def said_text(content: str | Iterable[Part] | None, where: str, *, after_result: bool) -> str:
    """What a user says, as `result_text` has it. `after_result`: the message follows the result of a tool, so what it
    shows is from the tool.

    Raises APIError for a picture or a file of the user's own, unless that is text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_said(part, f"{where}[{i}]", shown=after_result) for i, part in enumerate(content))


def _said(part: Part, where: str, *, shown: bool) -> str:
    kind = str(part.get("type"))
    if shown or kind in _TEXTS:
        return _part_text(part, where)
    text = readable(part)
    if text is None:
        raise not_read(kind, f"{where}.type")
    return text


def _part_text(part: Part, where: str) -> str:
    kind = str(part.get("type"))
    if kind in _TEXTS:
        text = part.get(_TEXTS[kind])
        if not isinstance(text, str):
            raise invalid(f"{where}.{_TEXTS[kind]}", f"a part of type {kind!r} needs it")
        return text
    if kind == "tool_reference":
        return f"[tool: {_cut(part.get('tool_name'))}]\n"
    text = readable(part)
    return described(part) if text is None else text


def readable(part: Part) -> str | None:
    """The text of a document or of a search result, after its name; None for a part that is no text."""
    source = part.get("source")
    if part.get("type") == "search_result":
        inner: Any = part.get("content")
        head = [part.get("title"), source]
    elif isinstance(source, dict) and source.get("type") in ("text", "content"):
        inner = source.get("data" if source["type"] == "text" else "content")
        head = [part.get("title"), part.get("context")]
    else:
        return _decoded(part)
    parts = inner if isinstance(inner, list) else [{"text": inner}]
    said = [str(one.get("text") or "") or described(one) for one in parts if isinstance(one, dict)]
    return "\n".join([*(line for line in head if isinstance(line, str)), "".join([*said, "\n"])])


def is_vendors(kind: str) -> bool:
    """Whether a block of this type is a call of a tool that a vendor's servers run, or its result."""
    return kind.endswith(("_tool_use", "_tool_result"))


def vendors_text(part: Part) -> str:
    """Such a block: what the tool was asked, or what it gave, as far as that is text. Encrypted parts are left out."""
    kind = _cut(part.get("type"))
    if kind.endswith("_use"):
        arguments = json.dumps(part.get("input") or {}, ensure_ascii=False)
        return f"[{kind}: {_cut(part.get('name'))} {arguments}]\n"
    lines: list[str] = [f"[{kind}]"]
    left: list[Any] = [part.get("content")]
    while left:
        one = left.pop()
        if isinstance(one, str):
            lines.append(one)
        elif isinstance(one, list):
            left += reversed(one)
        elif isinstance(one, dict) and one.get("type") == "document":
            lines.append((readable(one) or described(one)).removesuffix("\n"))
        elif isinstance(one, dict):
            lines += (value for name in _FOUND if isinstance(value := one.get(name), str) and value)
            left.append(one.get("content"))
    return "\n".join([*lines, ""])


def _decoded(part: Part) -> str | None:
    """The text of a file that comes as text in base64."""
    media_type, data, name = _facts(part)
    if not data or not media_type.startswith(_READ_AS_TEXT):
        return None
    try:
        text = base64.b64decode(data, validate=True).decode(errors="replace")
    except ValueError:
        return None
    return "\n".join(filter(None, [name, f"{text}\n"]))


def described(part: Part) -> str:
    """What was there: its kind, its media type, its size and its name, as far as they are known."""
    kind = str(part.get("type")).removeprefix("input_").removesuffix("_url")
    media_type, data, name = _facts(part)
    size = f"{len(data) * 3 // 4 - data.count('=', -2)} bytes" if data else ""
    facts = ", ".join(filter(None, [media_type, size, name]))
    return f"[{_cut(kind)}: {facts or 'of an unknown kind'}; not shown, as this model reads text only]\n"


def _facts(part: Part) -> tuple[str, str, str]:
    """Media type, content in base64, and name or address; empty where they are unknown."""
    fields: dict[str, Any] = dict(part)
    for name in _INNER:
        inner = part.get(name)
        if isinstance(inner, dict):
            fields = {key: value for key, value in fields.items() if key != name} | inner
    content = next((value for name in _CONTENTS if isinstance(value := fields.get(name), str)), "")
    names = (value for name in _NAMES if isinstance(value := fields.get(name), str) and value)
    name, media_type = next(names, ""), str(fields.get("media_type") or fields.get("format") or "")
    if content.startswith("data:"):
        head, _, content = content.partition(",")
        if not head.endswith(";base64"):
            content = base64.b64encode(_unquoted(content)).decode()
        media_type = head.removeprefix("data:").partition(";")[0] or media_type
    elif "://" in content[:16]:
        content, name = "", name or content
    return _cut(media_type or mimetypes.guess_type(name)[0] or ""), content, _cut(name)


def _unquoted(text: str) -> bytes:
    """Without percent-encoding; text with another use of the sign stays as it is.

    urllib.parse takes seconds for some megabytes. Quoted-printable text differs in its sign only, and C decodes it.
    """
    if _NO_ESCAPE.search(text):
        return text.encode()
    return a2b_qp(text.replace("=", "%3D").replace("%", "=").encode())


def _cut(text: object) -> str:
    """In one line, and not too long."""
    return " ".join(str(text or "")[:_LONGEST_NAME].split())
