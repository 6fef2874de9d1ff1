"""Parts of Oscine that are named as "module:name" in the table of a seam. Their extension may be missing."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def is_there(place: str) -> bool:
    """Whether the module can be found. It is not imported, but the packages that it is in are."""
    try:
        return find_spec(place.partition(":")[0]) is not None
    except ModuleNotFoundError:
        return False


def extension_of(place: str) -> str | None:
    _, _, inner = place.partition("oscine.extensions.")
    return inner.partition(".")[0] or None


def load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
