"""The file of calibrated scales: where it is, what it has, and which model it is for.

A scale is a power of two for each layer, kind (keys or values) and KV head. A model that was given as a folder has its
file in that folder. All other models have theirs in Oscine's cache, by a fingerprint of their weights.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscine.checkpoint.folder import fingerprint
from oscine.model.config import ModelConfig
from oscine.ops.kv.fp8 import LEAST_EXPONENT, MAX_EXPONENT
from oscine.settings.config import FOUND, ModelOptions
from oscine.system.environment import Environment
from oscine.system.model_files import read_json, shown
from oscine.system.owned_folder import check_new_file, complete_file, opened

NAME = "kv_scales.json"
BIAS = 127  # a scale 2^n is stored in pages as n + BIAS
_FIELDS = {"weights", "head_dim", "keys", "values"}
Exponents = list[list[int]]  # n of each layer and KV head


@dataclass(frozen=True, slots=True)
class KVScales:
    weights: str  # fingerprint of the weights; empty: random ones
    head_dim: int
    keys: Exponents
    values: Exponents

    @classmethod
    def read(cls, file: Path, weights: str, config: ModelConfig) -> "KVScales":
        """Raises ValueError for a file that is malformed, or of another model."""
        found = read_json(file)
        if found.get("weights") != weights:
            raise ValueError(
                f"{file}: the scales are of other weights than this model's: calibrate it again (oscine calibrate), or "
                "start it with --kv-scales none"
            )
        shape = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        for name in ("keys", "values"):
            if not _is_matrix(found.get(name), *shape[:2]):
                raise ValueError(f"{file}: {name} must have {shape[0]} layers of {shape[1]} exponents")
        if found.get("head_dim") != config.head_dim:
            raise ValueError(f"{file}: head_dim is {shown(found.get('head_dim'))}, and this model's is {shape[2]}")
        return cls(weights, config.head_dim, found["keys"], found["values"])

    def write(self, file: Path) -> None:
        """Raises OSError that names the file. The folder must not be open to everyone."""
        fields = {
            "about": "exponents of the scales of FP8 keys and values, by layer and KV head (oscine calibrate)",
            "weights": self.weights,
            "head_dim": self.head_dim,
        }
        rows = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
        for name, layers in (("keys", self.keys), ("values", self.values)):
            rows.append(f'  "{name}": [\n    ' + ",\n    ".join(map(str, layers)) + "\n  ]")
        with _named(file), opened(file.parent) as folder, complete_file(folder, file.name) as written:
            os.fchmod(written.fileno(), 0o644)  # as other files of a model: engines of other users may read it
            written.write(("{\n" + ",\n".join(rows) + "\n}\n").encode())

    @property
    def stored(self) -> list[list[list[int]]]:
        """As pages have them: [layers][2][KV heads]."""
        pairs = zip(self.keys, self.values, strict=True)
        return [[[n + BIAS for n in heads] for heads in pair] for pair in pairs]


def _is_matrix(found: Any, rows: int, columns: int) -> bool:
    """Whether these are exponents that pages can have."""

    def fits(row: Any) -> bool:
        return isinstance(row, list) and len(row) == columns and all(map(_is_exponent, row))

    return isinstance(found, list) and len(found) == rows and all(map(fits, found))


def _is_exponent(n: Any) -> bool:
    return type(n) is int and LEAST_EXPONENT <= n + BIAS <= MAX_EXPONENT


def find_scales(requested: str, path: Path | None, config: ModelConfig) -> tuple[Path, list[list[list[int]]]] | None:
    """The file, and what pages have of it. None: each token has a scale of its own.

    `requested`: the option --kv-scales. `path`: of the checkpoint; None for random weights. Raises ValueError for a
    file that is malformed, or of another model.
    """
    if requested != FOUND:
        return _read(Path(requested), "" if path is None else fingerprint(path), config)
    if path is None:
        return None
    folder, beside = Environment().scales_folder, path / NAME
    known = os.path.isdir(folder) or os.path.exists(beside)  # False, too, for a cache that this user may not enter
    weights = fingerprint(path) if known else ""
    files = [file for file in (_in_cache(weights), beside) if known and os.path.exists(file)]
    return _read(files[0], weights, config) if files else None


def _read(file: Path, weights: str, config: ModelConfig) -> tuple[Path, list[list[list[int]]]]:
    return file, KVScales.read(file, weights, config).stored


def place_of(weights: str, options: ModelOptions, path: Path) -> Path:
    """The file where a start finds the scales. Raises OSError and ValueError as check_place does.

    `path`: of the checkpoint. The scales of a folder that cannot be written go to Oscine's cache.
    """
    if path.is_dir() and os.path.isdir(options.model):
        with suppress(OSError):
            check_place(path / NAME)
            return path / NAME
    check_place(_in_cache(weights))
    return _in_cache(weights)


def check_place(file: Path) -> None:
    """Raises OSError for a file that cannot be written, and ValueError for one that is there and has no scales."""
    with _named(file), opened(file.parent) as folder:
        check_new_file(folder, file.name)
    if os.path.exists(file) and (not file.is_file() or (file.stat().st_size and not _has_scales(file))):
        raise ValueError(f"{file}: is there and has no calibrated scales, so it is kept; --output names another file")


def _has_scales(file: Path) -> bool:
    try:
        return read_json(file).keys() >= _FIELDS
    except ValueError:
        return False


def keep(scales: KVScales, file: Path, path: Path) -> None:
    """Writes the scales into the place of `place_of`, or into another file. Raises OSError."""
    scales.write(file)
    if file.resolve() == (path / NAME).resolve() and os.path.exists(own := _in_cache(scales.weights)):
        own.unlink()  # it would be found first


def _in_cache(weights: str) -> Path:
    return Environment().scales_folder / f"{weights}.json"


@contextmanager
def _named(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"{file}: cannot be written: {error.strerror or error}") from None


def scales_of(stored: Sequence[Sequence[Sequence[int]]], weights: str, head_dim: int) -> KVScales:
    """`stored`: as pages have them, [layers][2][KV heads]."""
    keys, values = ([[byte - BIAS for byte in layer[kind]] for layer in stored] for kind in range(2))
    return KVScales(weights, head_dim, keys, values)
