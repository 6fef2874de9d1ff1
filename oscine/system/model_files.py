"""Reads the files of a model. They may come from anywhere, so reading is bounded and errors are one line.

A file may be a link, as all are in the cache of the Hugging Face hub. What it leads to must be a regular file: a named
pipe would wait, and a device may have no end.
"""

import codecs
import json
import os
import stat
import sys
from io import BufferedReader
from pathlib import Path
from typing import Any

MAX_BYTES = 4 << 20  # of a file of JSON or text; gpt-oss's largest, the index of 120b, has 54 KB
MAX_TOKENIZER_BYTES = 64 << 20  # of tokenizer.json; gpt-oss's has 27 MB
_MAX_DEPTH = 64  # of objects and lists within each other
_MAX_SHOWN = 200  # characters of a name or value
_MAX_NAME = 255  # bytes
_LARGEST = sys.float_info.max
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
_OTHER_ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def shown(found: object) -> str:
    """A name, a value or an error that a file has brought, for a message: printable, 200 characters at most."""
    text = str(found)
    cut = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def is_file_name(name: object) -> bool:
    """Whether a file of a folder may have a name that a file has brought, and a message may show it."""
    whole = isinstance(name, str) and name == Path(name).name not in ("", "..")
    return whole and str(name).isprintable() and len(str(name).encode()) <= _MAX_NAME


def open_file(path: Path) -> BufferedReader:
    """Opens a regular file, without waiting. Raises ValueError for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise ValueError(f"{path}: must be a regular file, not {_KINDS[kind]}")
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, most: int = MAX_BYTES) -> bytes:
    """The content of a file, without UTF-8's byte order mark. Raises ValueError for a file of more than `most` bytes.

    Its size is compared before anything is read.
    """
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"{path}: has {size} bytes, and at most {most} are read")
        try:
            data = file.read(most)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    for mark, encoding in _OTHER_ENCODINGS.items():
        if data.startswith(mark):
            raise ValueError(f"{path}: must be UTF-8, not {encoding}")
    return data.removeprefix(codecs.BOM_UTF8)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of JSON, in which all numbers are finite. Raises ValueError naming file and field."""
    data = read_file(path)
    try:
        values = json.loads(data.decode())
        way = _way_to_infinity(values)
    except RecursionError:
        raise ValueError(f"{path}: nested more than {_MAX_DEPTH} deep") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if way is not None:
        raise ValueError(f"{path}: {shown('.'.join(reversed(way)))} must be finite")
    if not isinstance(values, dict):
        raise ValueError(f"{path}: not a JSON object")
    return values


def _way_to_infinity(value: Any, depth: int = 0) -> list[str] | None:
    """The keys that lead to a number that is not finite, the last one first; None without such a number.

    Raises RecursionError for values that are nested too deeply.
    """
    if isinstance(value, int | float):
        return None if abs(value) <= _LARGEST else []
    if isinstance(value, dict | list) and depth == _MAX_DEPTH:
        raise RecursionError
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        if (way := _way_to_infinity(inner, depth + 1)) is not None:
            return [*way, str(key)]
    return None
