"""The names of models in Ollama's spelling, which has a tag: gpt-oss:20b, oscine-nano:latest."""

import re
from collections.abc import Iterable

_PUBLISHED = re.compile(r"(?:[^/:]+/)?(gpt-oss(?:-safeguard)?)-(\d+b)(.*)", re.IGNORECASE)  # openai/gpt-oss-20b
_LATEST = "latest"


def ollama_name(name: str) -> str:
    """A name without a tag gets one: the size of a published model, or else `latest`."""
    published = _PUBLISHED.fullmatch(name)
    if published:
        return "{}:{}{}".format(*published.groups())
    return name if ":" in name.rpartition("/")[2] else f"{name}:{_LATEST}"


def meant_by(name: str, served: Iterable[str]) -> str | None:
    """The served name that is the same in Ollama's spelling; None if there is none.

    The tag `latest` stands for the first model of a family that has no model with this tag.
    """
    spelled = {ollama_name(other).lower(): other for other in reversed([*served])}
    wanted = ollama_name(name).lower()
    if wanted in spelled:
        return spelled[wanted]
    family, _, tag = wanted.rpartition(":")
    relatives = [other for spelling, other in spelled.items() if spelling.rpartition(":")[0] == family]
    return relatives[-1] if relatives and tag == _LATEST else None
