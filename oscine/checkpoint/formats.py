"""Formats of models that are one file, or a few, and no folder of safetensors.

Packages outside add formats by entry points of the group `oscine.formats`, which are read only if nothing here
recognises a model.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING

from oscine.system.extensions import added, extension_of, is_there, load

if TYPE_CHECKING:
    from torch import Tensor

    from oscine.model.config import ModelConfig
    from oscine.model.weights import TensorSource

logger = logging.getLogger(__name__)

GROUP = "oscine.formats"
# name -> an object of Format
FORMATS = {
    "gguf": "oscine.extensions.formats.gguf.format:GGUF",
    "ollama": "oscine.extensions.formats.ollama:STORE",
}
# For folders of safetensors in the layouts of other tools
TOOL_FOLDER = "oscine.extensions.formats.layouts.folder:ToolFolder"
CHECK_METHOD = "oscine.extensions.formats.layouts.table:check_method"
WHY_NO_WEIGHTS = "oscine.extensions.formats.layouts.table:why_no_weights"


class Format:
    """Finds models by what users name, and reads them. A model is known by its first file."""

    def find(self, name: str) -> Path | None:
        """The first file of the model that `name` means: a path, or a name of the format's own. It may be missing.

        None if this is no name of the format. Raises ValueError if it is, and means no model.
        """
        return None

    def within(self, folder: Path) -> Path | None:
        """The same for the one model in a folder. Raises ValueError for several."""
        return None

    def reads(self, path: Path) -> bool:
        """Whether `open` and the others are for this file."""
        return False

    def models_among(self, names: Sequence[str]) -> set[str]:
        """Of names of files, the first one of each model."""
        return set()

    def parts(self, path: Path) -> list[Path]:
        """All files of a model, from any of them."""
        return [path]

    def config(self, path: Path) -> "ModelConfig":
        """Raises ValueError that names the file and what is wrong in it."""
        raise NotImplementedError

    def tokenizer(self, path: Path) -> Path:
        """The folder of tokenizer.json. Raises ValueError for a vocabulary that is not known."""
        raise NotImplementedError

    def open(self, path: Path) -> "tuple[ModelConfig, TensorSource]":
        """Checks everything but the values of the tensors. Raises ValueError."""
        raise NotImplementedError

    def raw_tensors(self, path: Path) -> "Iterator[tuple[str, Tensor]]":
        """The bytes of each tensor, uint8."""
        raise NotImplementedError


@cache
def _own() -> tuple[Format, ...]:
    return tuple(load(place) for place in FORMATS.values() if is_there(place))


@cache
def _of_others() -> tuple[Format, ...]:
    return tuple(added(GROUP, "the format", logger.warning, EntryPoint.load))


def _all() -> Iterator[Format]:
    yield from _own()
    yield from _of_others()


def find(name: str) -> Path | None:
    """As Format.find, for the first format that knows the name."""
    return next((path for one in _all() if (path := one.find(name)) is not None), None)


def within(folder: Path) -> Path | None:
    return next((path for one in _all() if (path := one.within(folder)) is not None), None)


def format_of(path: Path) -> Format:
    """Of a file that `find` or `within` returned. Raises ValueError if no format reads it any more."""
    for one in _all():
        if one.reads(path):
            return one
    raise ValueError(f"{path} has no format that is known")


def models_among(names: Sequence[str]) -> dict[str, Format]:
    """Of the names of files, the first one of each model."""
    return {name: one for one in _all() for name in one.models_among(names)}


def missing() -> str:
    """For errors: which extensions would know more; empty if all are there."""
    lacking = {extension_of(place) for place in FORMATS.values() if not is_there(place)}
    return f" (other formats need the extension {', '.join(sorted(lacking))})" if lacking else ""
