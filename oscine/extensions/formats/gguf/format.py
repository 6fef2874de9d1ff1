"""GGUF as a format of models."""

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from oscine.checkpoint.formats import Format
from oscine.extensions.formats.gguf.config import config_of, tokenizer_of
from oscine.extensions.formats.gguf.file import Gguf, gguf_in, is_gguf, parts_of
from oscine.model.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from oscine.model.weights import TensorSource


class GgufFormat(Format):
    def find(self, name: str) -> Path | None:
        path = Path(name)
        return parts_of(path)[0] if os.path.isfile(path) and is_gguf(path) else None

    def within(self, folder: Path) -> Path | None:
        return gguf_in(folder)

    def reads(self, path: Path) -> bool:
        """A file that is missing, too: opening it says so."""
        return is_gguf(path) or not path.exists()

    def models_among(self, names: Sequence[str]) -> set[str]:
        return {parts_of(Path(name))[0].name for name in names if fnmatch(name, "*.gguf") and "/" not in name}

    def parts(self, path: Path) -> list[Path]:
        return parts_of(path)

    def config(self, path: Path) -> ModelConfig:
        return config_of(Gguf(path))

    def tokenizer(self, path: Path) -> Path:
        return tokenizer_of(Gguf(path))

    def open(self, path: Path) -> "tuple[ModelConfig, TensorSource]":
        from oscine.extensions.formats.gguf.checkpoint import GgufCheckpoint

        file = Gguf(path)
        config = config_of(file)
        return config, GgufCheckpoint(file, config)

    def raw_tensors(self, path: Path) -> "Iterator[tuple[str, Tensor]]":
        from oscine.extensions.formats.gguf.checkpoint import raw_tensors

        return raw_tensors(Gguf(path))


GGUF = GgufFormat()
