"""The content of a message, a text or a list of parts, as one text.

Parts are joined without a separator, as openai-harmony does: clients may cut a text anywhere.
"""

from collections.abc import Collection

from oscine.api.http.errors import invalid
from oscine.api.serving.schemas import ContentPart


def content_text(content: str | list[ContentPart] | None, kinds: Collection[str], where: str) -> str:
    """`kinds` are the types of parts that are read, `where` the path of the message.

    Raises APIError for a part of another type, and for an empty one.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part_text(part, kinds, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part_text(part: ContentPart, kinds: Collection[str], where: str) -> str:
    if part.type not in kinds:
        raise invalid(f"{where}.type", f"the model reads text, not {part.type!r}")
    field, text = ("refusal", part.refusal) if part.type == "refusal" else ("text", part.text)
    if text is None:
        raise invalid(f"{where}.{field}", f"a part of type {part.type!r} needs it")
    return text
