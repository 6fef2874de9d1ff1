"""Forms of the texts that options take."""

import datetime
import json
import os
from collections.abc import Iterable


def is_origin(text: str) -> bool:
    """Whether browsers send such an origin: scheme and host without a path, or null for files. `*` stands for all."""
    scheme, _, host = text.partition("://")
    return text in ("*", "null") or (bool(scheme and host) and "/" not in host)


def origins(text: str) -> Iterable[str]:
    """One origin, or vLLM's JSON list of them."""
    try:
        return map(str, json.loads(text)) if text.startswith("[") else (text,)
    except ValueError:
        return (text,)


def is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def is_hex(text: str) -> bool:
    try:
        return bytes.fromhex(text).hex() == text.lower()
    except ValueError:
        return False


def load_of(text: str) -> tuple[int, int, int] | None:
    """Requests, tokens of a prompt and tokens of an answer, all at least 1, of C:ISL:OSL; None for another text."""
    parts = text.split(":")
    if len(parts) != 3 or not all(part.isascii() and part.isdecimal() and 0 < int(part) < 1 << 31 for part in parts):
        return None
    requests, prompt, answer = map(int, parts)
    return requests, prompt, answer


def shapes_and_skew(text: str) -> tuple[str, bool]:
    """Splits a value of --random-weights: the name or file of the shapes, and whether :skewed follows it.

    An existing file whose own name ends in :skewed is taken as a file.
    """
    shapes = text.removesuffix(":skewed")
    return (text, False) if shapes == text or os.path.exists(text) else (shapes, True)
