"""A matrix in the files of a folder, or the same matrix of all experts: found, checked by the headers, and decoded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oscine.checkpoint.folder import Stored
from oscine.checkpoint.quantize import Quantized
from oscine.extensions.formats.layouts.encodings import ENCODINGS, FLOATS, Encoding, Shape
from oscine.system.model_files import shown

_NO_SCALE = 255  # NaN of E8M0


@dataclass(frozen=True, slots=True)
class Matrix:
    """Decoded when it is asked for. `shape`: [out, in], or [experts, out, in]."""

    stored: Stored
    parts: Mapping[str, str]  # the name of a tensor, by its part
    shape: Shape
    encoding: Encoding
    main: str  # the part that has the values
    swaps: bool  # whether the last two dimensions are swapped

    @classmethod
    def find(cls, stored: Stored, parts: Mapping[str, str], shape: Shape) -> "Matrix":
        """Raises ValueError that names the file and the tensor if no tool writes such parts, or their shapes differ."""
        dtypes = {part: stored.header(name).get_dtype() for part, name in parts.items()}
        for encoding in ENCODINGS:
            for main in (main for main in encoding.mains if dtypes.get(main) in encoding.dtypes):
                if all(any(part in parts for part in group) for group in encoding.needs):
                    return cls(stored, parts, shape, encoding, main, cls._check(stored, parts, shape, encoding, main))
        part, name = next((part, name) for part, name in parts.items() if part != "bias")
        others = sorted(parts.keys() - {part, "bias"})
        how = f", with {shown(', '.join(others))}, which no known tool writes" if others else ", not BF16"
        raise ValueError(f"{stored.files[name]}: {shown(name)} has dtype {dtypes[part]}{how}")

    @staticmethod
    def _check(stored: Stored, parts: Mapping[str, str], shape: Shape, encoding: Encoding, main: str) -> bool:
        """Whether the dimensions are swapped. Raises ValueError."""
        for part in parts.keys() - encoding.parts - {"bias"}:
            name = parts[part]
            raise ValueError(f"{stored.files[name]}: {shown(name)} is not a tensor of this configuration")
        name, wanted = parts[main], encoding.stored(shape)
        found = tuple(stored.header(name).get_shape())
        swapped = (*wanted[:-2], wanted[-1], wanted[-2])
        swaps = main == "in_out" or (main == "blocks" and encoding.tool == FLOATS)
        if wanted != swapped and found == wanted and encoding.stored(shape) != shape:
            return False  # of packed values, the shape says it
        expected = swapped if swaps else wanted
        if not wanted[-1]:  # words: their width says the bits
            expected = (*expected[:-1], *found[-1:])
            bits = found[-1] * 32 / shape[-1] if found else 0
            if bits not in (2, 3, 4, 5, 6, 8):
                raise ValueError(
                    f"{stored.files[name]}: {shown(name)} has shape {list(found)}: {bits:g} bits per value"
                )
        if found != expected:
            raise ValueError(f"{stored.files[name]}: {shown(name)} has shape {list(found)}, not {list(expected)}")
        return swaps

    @property
    def path(self) -> Path:
        return self.stored.files[self.parts[self.main]]

    def values(self, expert: int | None = None) -> Quantized | Tensor:
        """[out, in], of this expert if there are several. Raises ValueError."""
        try:
            made = self.encoding.decode(lambda part: self._read(part, expert), self.shape[-2:])
        except (ValueError, RuntimeError, IndexError, KeyError, TypeError) as error:
            why = shown(str(error).splitlines()[0])
            raise ValueError(f"{self.path}: {shown(self.parts[self.main])}: {why}") from None
        whole = bool((made.scales != _NO_SCALE).all()) if isinstance(made, Quantized) else self._is_finite(made)
        if not whole:
            raise ValueError(f"{self.path}: {shown(self.parts[self.main])}: a weight is not finite")
        return made

    def _is_finite(self, made: Tensor) -> bool:
        """Floats are as they are: who quantises them checks them."""
        return self.encoding.tool == FLOATS or bool(torch.isfinite(made.sum()))

    def _read(self, part: str, expert: int | None) -> Tensor | None:
        if (name := self.parts.get(part)) is None:
            return None
        header, experts = self.stored.header(name), self.shape[:-2]
        shape = header.get_shape()
        found: Tensor = header[expert] if experts and shape[:1] == [*experts] else self.stored.get(name)
        main = len(self.stored.header(self.parts[self.main]).get_shape()) - len(experts)
        return found.mT if self.swaps and found.dim() == main else found
