"""Quantises experts to MXFP4 (oscine.ops.moe.mxfp4), as fine-tunes in bfloat16 need it.

The scale of a block of 32 values is the one of two with the least squared error: the one by the usual rule, at which
the largest magnitude is in [4, 8), or twice as much. Magnitudes above 6 become 6. Half of the usual scale is never
better.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from oscine.model.weights import TensorSource
from oscine.ops.moe.mxfp4 import BLOCK, MAGNITUDES
from oscine.ops.native.library import library, unavailable

MAX_ERROR = 0.15  # relative: normally distributed weights have 0.11, ones with outliers 0.13
_BIAS = 127  # of an E8M0 scale
_LEAST = -126  # a smaller power of two is no normal float32
_LARGEST = 2  # exponent of E2M1's largest magnitude, 6
_CANDIDATES = (0, 1)  # added to the usual exponent
_MANTISSA, _EXPONENT, _ONE = 23, 0x7F800000, 0x3F800000  # of float32: its bits, a mask, and 1.0
_PART = 1 << 12  # blocks that a thread takes at once
_AT_ONCE = 1 << 20  # values: temporary tensors stay in the CPU's caches
_CODES = torch.zeros(25, dtype=torch.uint8)  # E2M1 code, by twice the value, plus 12
for _code, _magnitude in enumerate(MAGNITUDES):
    _CODES[12 + int(2 * _magnitude)], _CODES[12 - int(2 * _magnitude)] = _code, (8 | _code) if _code else 0


class NotFiniteError(ValueError):
    """A weight is infinite, or not a number."""


class Quantized(NamedTuple):
    blocks: Tensor  # uint8 [..., K / 32, 16]
    scales: Tensor  # uint8 [..., K / 32]


@dataclass(frozen=True, slots=True)
class QuantizationError:
    """Sums of squares, of differences and of values."""

    difference: float = 0.0
    values: float = 0.0

    @property
    def relative(self) -> float:
        """Root mean square of the difference, relative to that of the values."""
        return math.sqrt(self.difference / self.values) if self.values else 0.0

    def __add__(self, other: "QuantizationError") -> "QuantizationError":
        return QuantizationError(self.difference + other.difference, self.values + other.values)


class QuantizingSource:
    """A source of tensors that quantises the experts which are stored in another type, when they are asked for.

    No more than one matrix of a layer is in memory, and one expert of it in floats.
    """

    def __init__(self) -> None:
        self.errors: dict[str, QuantizationError] = {}  # by the matrix of experts, once it was quantised
        self._newest: tuple[str, Quantized] | None = None

    def get(self, name: str) -> Tensor:
        raise NotImplementedError

    def experts(self, matrix: str) -> Iterator[Quantized | Tensor]:
        """Each expert of a matrix, as it is stored: in MXFP4, or in floats [rows, K]."""
        raise NotImplementedError

    def quantized(self, name: str) -> Tensor:
        """The blocks or the scales of all experts, by their published name. The newest matrix is kept, as both are
        asked for one after the other. Raises NotFiniteError, and what `experts` raises."""
        matrix, _, part = name.rpartition("_")
        if self._newest is None or self._newest[0] != matrix:
            self._newest = None
            made, error = [], QuantizationError()
            for expert in self.experts(matrix):
                if isinstance(expert, Tensor):
                    (blocks, scales), own = quantize(expert[None])
                    expert, error = Quantized(blocks[0], scales[0]), error + own
                made.append(expert)
            if error.values:
                self.errors[matrix] = error
            self._newest = matrix, Quantized(*map(torch.stack, zip(*made, strict=True)))
        return self._newest[1].blocks if part == "blocks" else self._newest[1].scales


def described(errors: Mapping[str, QuantizationError]) -> str:
    """The relative errors of kinds of matrices, and a warning if one is larger than any good source gives."""
    text = "relative errors: " + ", ".join(f"{kind} {error.relative:.1%}" for kind, error in errors.items())
    if max(error.relative for error in errors.values()) <= MAX_ERROR:
        return text
    return f"{text}. WARNING: more than {MAX_ERROR:.0%}, so answers may be worse: measure them with `oscine eval`"


def errors_of(source: TensorSource) -> dict[str, QuantizationError]:
    """The errors of the matrices of experts that were quantised so far, by their names."""
    return source.errors if isinstance(source, QuantizingSource) else {}


def experts_of(source: TensorSource, matrix: str) -> Iterator[Quantized | Tensor]:
    """As QuantizingSource.experts, for any source."""
    if isinstance(source, QuantizingSource):
        return source.experts(matrix)
    blocks, scales = (source.get(f"{matrix}_{part}") for part in ("blocks", "scales"))
    return map(Quantized, blocks, scales)


def quantize(weight_ERK: Tensor) -> tuple[Quantized, QuantizationError]:
    """Floats [experts, rows, K] in any memory layout, with K a multiple of 32. Raises NotFiniteError."""
    blocks = weight_ERK.view(*weight_ERK.shape[:-1], -1, BLOCK)
    packed = torch.empty(*blocks.shape[:-1], BLOCK // 2, dtype=torch.uint8)
    scales = torch.empty(blocks.shape[:-1], dtype=torch.uint8)
    error = QuantizationError()
    if unavailable() is None:
        for own, packed_own, scales_own in zip(weight_ERK, packed, scales, strict=True):
            error += _by_library(own, packed_own, scales_own)
        return Quantized(packed, scales), error
    step = max(1, _AT_ONCE // weight_ERK.shape[-1])  # rows
    for own in zip(blocks, packed, scales, strict=True):
        for part, packed_part, scales_part in zip(*(tensor.split(step) for tensor in own), strict=True):
            values = part.to(torch.float32, memory_format=torch.contiguous_format)
            error += _quantize(values, packed_part, scales_part)
    return Quantized(packed, scales), error


def _by_library(weight_RK: Tensor, packed: Tensor, scales: Tensor) -> QuantizationError:
    """The same, by the C kernel."""
    values = weight_RK.contiguous() if weight_RK.dtype == torch.bfloat16 else weight_RK.contiguous().float()
    sums = torch.zeros(-(-scales.numel() // _PART), 2, dtype=torch.float64)
    is_short, pointers = values.dtype == torch.bfloat16, (one.data_ptr() for one in (packed, scales, sums))
    library().oscine_quantize(values.data_ptr(), is_short, scales.numel(), _PART, *pointers)
    difference, squares = sums.sum(0).tolist()
    if math.isnan(difference):
        raise NotFiniteError("a weight is not finite")
    return QuantizationError(difference, squares)


def _quantize(values_RBK: Tensor, packed: Tensor, scales: Tensor) -> QuantizationError:
    """Writes the blocks and scales of some rows."""
    largest = values_RBK.abs().amax(-1, keepdim=True)
    if not torch.isfinite(largest.sum()):
        raise NotFiniteError("a weight is not finite")
    usual = ((largest.view(torch.int32) >> _MANTISSA) - _BIAS - _LARGEST).clamp_(_LEAST, _BIAS - 1)
    tried = [_rounded(values_RBK, usual + more) for more in _CANDIDATES]
    (rounded, least), (other, others) = tried
    better = others < least
    _pack(torch.where(better, other, rounded), packed)
    scales.copy_((usual + better + _BIAS).squeeze(-1))
    return QuantizationError(
        float(torch.where(better, others, least).double().sum()), float(values_RBK.square().sum(-1).double().sum())
    )


def _rounded(values: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest values of E2M1 to `values` without their scales, and the squared error of each block.

    Values are multiples of half the power of two below them, 0.5 at least. The sum with a number that is larger by 1.5
    times 2^23 has no bits for less, and rounds halves to the even multiple.
    """
    units = values * _power_of_two(-exponents)
    large = units.view(torch.int32).bitwise_and(_EXPONENT).clamp_(min=_ONE).view(torch.float32).mul_(0.75 * 2**23)
    rounded = units.add(large).sub_(large).clamp_(-6, 6)
    error = units.sub_(rounded).square_().sum(-1, keepdim=True)
    return rounded, error.mul_(_power_of_two(exponents).square_())


def _power_of_two(exponents: Tensor) -> Tensor:
    return ((exponents + _BIAS) << _MANTISSA).view(torch.float32)


def _pack(rounded: Tensor, packed: Tensor) -> None:
    """Codes by twice the value, from -12 to 12."""
    codes = _CODES.index_select(0, rounded.mul_(2).add_(12).int().flatten()).view(rounded.shape)
    torch.bitwise_or(codes[..., ::2], codes[..., 1::2] << 4, out=packed)
