"""Names of models in Ollama's spelling, which has a tag: gpt-oss:20b, oscine-nano:latest."""

import re
from collections.abc import Iterable

_PUBLISHED = re.compile(r"(?:[^/:]+/)?(gpt-oss(?:-safeguard)?)-(\d+b)(.*)", re.IGNORECASE)  # openai/gpt-oss-20b
_LATEST = "latest"


def ollama_name(name: str) -> str:
    """The name in Ollama's spelling. A missing tag becomes the size of a published model, or else `latest`."""
    published = _PUBLISHED.fullmatch(name)
    if published:
        return "{}:{}{}".format(*published.groups())
    return name if ":" in name.rpartition("/")[2] else f"{name}:{_LATEST}"


def meant_by(name: str, served: Iterable[str]) -> str | None:
    """The served name that equals `name` in Ollama's spelling; None if there is none.

    If no model of the family has the tag `latest`, it stands for the first served one.
    """
    spelled = {ollama_name(other).lower(): other for other in reversed([*served])}
    wanted = ollama_name(name).lower()
    if wanted in spelled:
        return spelled[wanted]
    family, _, tag = wanted.rpartition(":")
    relatives = [other for spelling, other in spelled.items() if spelling.rpartition(":")[0] == family]
    return relatives[-1] if relatives and tag == _LATEST else None
