"""Parts that the table of a seam names as "module:name", and parts that other packages add by entry points.

The extension of a part may be missing.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, NamedTuple

_EXTENSIONS = "oscine.extensions"
# Which other extensions an extension imports. Without these it cannot be used.
NEEDS = {
    "adapters": ("formats",),
    "bench": ("parallel",),
    "cluster": ("replicas",),
    "doctor": ("apis", "bench", "formats", "timing"),
    "eval": ("apis", "bench"),
    "file_search": ("apis",),
    "plan": ("bench", "cluster", "disaggregation", "offload", "replicas", "timing"),
    "profile": ("bench", "parallel", "plan", "timing"),
    "replicas": ("kv_events",),
    "verify": ("bench", "eval"),
}


def is_there(place: str) -> bool:
    """Whether the module, and what its extension needs, can be found.

    It is not imported, but the packages that it is in are.
    """
    return not _missing(place)


def _missing(place: str) -> list[str]:
    """Modules that cannot be found: this one, and the extensions that its extension needs, with their needs."""
    module = place.partition(":")[0]
    needed = NEEDS.get(extension_of(place), ())
    found = [missing for name in needed for missing in _missing(f"{_EXTENSIONS}.{name}")]
    try:
        return found if find_spec(module) is not None else [module, *found]
    except ModuleNotFoundError:
        return [module, *found]


def extension_of(place: str) -> str:
    """Of a module, or of a place in it. Empty for the nucleus."""
    parts = place.partition(":")[0].split(".")
    return parts[2] if ".".join(parts[:2]) == _EXTENSIONS and len(parts) > 2 else ""


def lacking(place: str) -> str:
    """What is missing, for an error, where the extension of a part is."""
    return f"needs the extension {extension_of(next(iter(_missing(place)), place))}"


def load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


class Place(NamedTuple):
    """Of a part that an option wants."""

    asked: str  # the option, for errors
    name: str  # module:name


def part(place: Place) -> Any:
    """Raises ValueError if its extension is missing."""
    check_part(place)
    return load(place.name)


def check_part(place: Place) -> None:
    """Raises ValueError if the extension of a part is missing."""
    if not is_there(place.name):
        raise ValueError(f"{place.asked} {lacking(place.name)}")


def added(
    group: str, what: str, warn: Callable[[str], object], use: Callable[[EntryPoint], Any], **chosen: Any
) -> Iterator[Any]:
    """What `use` makes of each entry point of a group, or of the `chosen` ones. A broken one costs one warning.

    `what`: such a part, as the warning calls it.
    """
    for entry in entry_points(group=group, **chosen):
        try:
            found = use(entry)
        except Exception as error:  # whatever another package does
            warn(f"{what} {entry.name} of {entry.value} cannot be used: {error}")
        else:
            yield found
