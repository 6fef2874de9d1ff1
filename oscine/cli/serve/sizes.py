"""Numbers with units: 512M, 1GB, 1.5GiB, 128k."""

import argparse
import re
from decimal import Decimal

_NUMBER = re.compile(r"(?P<number>[\d_]+(?:\.\d+)?)\s*(?:(?P<prefix>[kKMGTmgt])(?P<binary>i?)(?P<bytes>[bB]?)|[bB])?")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def num_bytes(text: str) -> int:
    """512M and 1GiB are powers of 1024, 1GB and 500k of 1000."""
    return _read(text, "a number of bytes such as 1073741824, 512M, 1GiB (powers of 1024) or 1GB (of 1000)")


def num_tokens(text: str) -> int:
    """128K is 131072, 128k is 128000."""
    return _read(text, "a number of tokens such as 131072, 128K (131072) or 128k (128000)", unit=False)


def _read(text: str, rule: str, *, unit: bool = True) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or (not unit and text.rstrip()[-1:] in "bB"):
        raise argparse.ArgumentTypeError(f"it must be {rule}, not {text!r}")
    prefix = match["prefix"] or ""
    binary = bool(match["binary"]) or (prefix.isupper() and not match["bytes"])
    value = Decimal(match["number"].replace("_", "")) * (1024 if binary else 1000) ** _POWERS.get(prefix.lower(), 0)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"it must be {rule}, not {text!r}")
    return int(value)


def written(size: int) -> str:
    """A size as `num_bytes` reads it, in the largest unit of 1024 that leaves a whole number."""
    power = max((p for p in range(5) if size % 1024**p == 0), default=0) if size else 0
    return f"{size // 1024**power}{('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
