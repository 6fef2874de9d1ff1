"""How tools store the values of a matrix [..., out, in]: the tensors that it consists of, and their arithmetic.

E2M1 are the values of MXFP4, E8M0 its scales. A packed byte has the value of the lower index in its low nibble, except
in bitsandbytes. Everything is computed in float32.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from oscine.checkpoint import layout
from oscine.checkpoint.quantize import Quantized
from oscine.ops.moe.mxfp4 import BLOCK, dequantize

Shape = tuple[int, ...]
Read = Callable[[str], Tensor | None]  # a part, by its name; None if the matrix has no such part
_TILE = 128  # rows and columns that have one scale in FP8; the last tile may be smaller
_NEUTRAL = 127  # E8M0 of 1
_ROWS = 1 << 12  # that are unpacked at once
FLOATS = "floats"  # the last of ENCODINGS
_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


@dataclass(frozen=True, slots=True)
class Encoding:
    """One way. The first that fits is taken."""

    tool: str
    mains: tuple[str, ...]  # names of the part that has the values
    dtypes: tuple[str, ...]  # of that part, as safetensors spells them
    needs: tuple[tuple[str, ...], ...]  # other parts; of each group at least one
    stored: Callable[[Shape], Shape]  # the shape of that part
    decode: Callable[[Read, Shape], Tensor | Quantized]  # `Shape`: of the matrix

    @property
    def parts(self) -> set[str]:
        return {part for group in self.needs for part in group} | {*self.mains, "biases"}


def _one(read: Read, *names: str) -> Tensor:
    return next(found for name in names if (found := read(name)) is not None)


def spread(scale: Tensor, shape: Shape) -> Tensor:
    """A scale for each value, [] to `shape`. It has one for all, for each row, or for each tile. Raises ValueError."""
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() == 1:
        scale = scale[:, None]
    for dimension, (length, count) in enumerate(zip(shape, scale.shape, strict=False)):
        tile = _TILE if -(-length // _TILE) == count else length // max(count, 1)
        if scale.dim() != len(shape) or (tile != _TILE and tile * count != length):
            raise ValueError(f"scales of shape {list(scale.shape)} do not fit a matrix of {list(shape)}")
        if count not in (1, length):
            scale = scale.repeat_interleave(tile, dimension).narrow(dimension, 0, length)
    return scale


def _floats(read: Read, shape: Shape) -> Tensor:
    return _one(read, "weight", "in_out", "blocks")


def _scale(scale: Tensor) -> Tensor:
    """Floats of any width, or E8M0. NaN of E8M0 becomes infinite."""
    return torch.ldexp(torch.ones(scale.shape), scale.int() - _NEUTRAL) if scale.dtype == torch.uint8 else scale.float()


def _scaled(read: Read, shape: Shape) -> Tensor:
    scale = _scale(_one(read, "weight_scale", "weight_scale_inv", "scale_inv"))
    return _one(read, "weight", "in_out").float() * spread(scale, shape)


def _int8_of_bitsandbytes(read: Read, shape: Shape) -> Tensor:
    return _one(read, "weight").float() * spread(_one(read, "SCB").float() / 127, shape)


def _four_bits_of_bitsandbytes(read: Read, shape: Shape) -> Tensor:
    """A value is that of a table, times the largest magnitude of its block. These may be quantised themselves, by
    another table."""
    state = json.loads(bytes(_one(read, *_STATES).tolist()))
    if tuple(state["shape"]) != shape:
        raise ValueError(f"its quant_state has shape {state['shape']}, not {list(shape)}")
    largest = _one(read, "weight.absmax")
    if (table := read("weight.nested_quant_map")) is not None:
        nested = _one(read, "weight.nested_absmax").repeat_interleave(state["nested_blocksize"])[: len(largest)]
        largest = table[largest.int()] * nested + state["nested_offset"]
    packed = _one(read, "weight").flatten()
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()[: prod(shape)]
    values = _one(read, "weight.quant_map")[codes.int()]
    return (values * largest.repeat_interleave(state["blocksize"])[: len(values)]).view(shape)


def _blocks(packed: Tensor, shape: Shape) -> Tensor:
    return packed.contiguous().view(*shape[:-1], shape[-1] // BLOCK, BLOCK // 2)


def _e2m1(packed: Tensor, shape: Shape) -> Tensor:
    blocks = _blocks(packed, shape)
    return dequantize(blocks, torch.full(blocks.shape[:-1], _NEUTRAL, dtype=torch.uint8))


def _nvfp4(read: Read, shape: Shape) -> Tensor:
    """A scale in E4M3 per 16 values, and one in float32 for all: as a divisor in compressed-tensors."""
    scale, divisor = _one(read, "weight_scale").float(), read("weight_global_scale")
    whole = read("weight_scale_2") if divisor is None else divisor.float().reciprocal()
    assert whole is not None
    return _e2m1(_one(read, "weight_packed", "weight", "in_out"), shape) * spread(scale, shape) * spread(whole, shape)


def _mxfp4(read: Read, shape: Shape) -> Quantized:
    return _packed(_one(read, "weight_packed", "weight", "blocks"), _one(read, "weight_scale", "scales"), shape)


def _packed(packed: Tensor, scales: Tensor, shape: Shape) -> Quantized:
    blocks = _blocks(packed, shape)
    if scales.shape != blocks.shape[:-1] or scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        found = f"{str(scales.dtype).removeprefix('torch.')} {list(scales.shape)}"
        raise ValueError(f"scales of MXFP4 are uint8 {list(blocks.shape[:-1])}, not {found}")
    return Quantized(blocks, scales.view(torch.uint8).contiguous())


def _integers(read: Read, shape: Shape) -> Tensor:
    """Symmetric integers of some bits in 32-bit words."""
    words = _one(read, "weight_packed")
    bits = words.shape[-1] * 32 // shape[-1]
    return (_unpacked(words, shape) - float(1 << (bits - 1))) * spread(_scale(_one(read, "weight_scale")), shape)


def _mlx(read: Read, shape: Shape) -> Tensor | Quantized:
    """By the widths: integers with a scale and a bias per group, MXFP4, MXFP8, or NVFP4 without a scale for all."""
    words, scales, biases = _one(read, "weight"), _one(read, "scales"), read("biases")
    if biases is not None:
        return _unpacked(words, shape) * spread(scales.float(), shape) + spread(biases.float(), shape)
    packed = words.contiguous().view(torch.uint8)
    if packed.shape[-1] == shape[-1]:
        return packed.view(torch.float8_e4m3fn).float() * spread(_scale(scales), shape)
    if scales.shape[-1] * BLOCK == shape[-1]:
        return _packed(packed, scales, shape)
    return _e2m1(packed, shape) * spread(scales.view(torch.float8_e4m3fn).float(), shape)


def _unpacked(words: Tensor, shape: Shape) -> Tensor:
    """Unsigned integers of a few bits, the lowest bits first, as float32."""
    rows = words.contiguous().view(torch.uint8).flatten(0, -2)
    bits = rows.shape[-1] * 8 // shape[-1]
    out = torch.empty(len(rows), shape[-1])
    octets, shifts = torch.arange(bits) * 8, torch.arange(8) * bits  # 8 values have as many bytes as one has bits
    for start in range(0, len(rows), _ROWS):
        some, to = rows[start : start + _ROWS], out[start : start + _ROWS]
        joined = (some.view(len(some), -1, bits).long() << octets).sum(-1, keepdim=True)
        to.copy_(((joined >> shifts) & ((1 << bits) - 1)).flatten(1))
    return out.view(shape)


def _as_it_is(shape: Shape) -> Shape:
    return shape


def _halved(shape: Shape) -> Shape:
    return (*shape[:-1], shape[-1] // 2)


def _published(shape: Shape) -> Shape:
    return (*shape[:-1], shape[-1] // BLOCK, BLOCK // 2)


def _flat(shape: Shape) -> Shape:
    return (-(-prod(shape) // 2), 1)


def _words(shape: Shape) -> Shape:
    """The width depends on the bits, so it is not checked here: 0."""
    return (*shape[:-1], 0)


_WEIGHT, _PACKED, _EITHER = ("weight",), ("weight_packed",), ("weight", "in_out")
_FP8 = ("F8_E4M3", "F8_E5M2", "I8")
_TABLES = (("weight.absmax",), ("weight.quant_map",), _STATES)
_NESTED = ("weight.nested_absmax",), ("weight.nested_quant_map",)
_SCALES = ("weight_scale",), ("weight_scale", "weight_scale_inv", "scale_inv")
ENCODINGS = (
    Encoding("bitsandbytes, nested", _WEIGHT, ("U8",), (*_TABLES, *_NESTED), _flat, _four_bits_of_bitsandbytes),
    Encoding("bitsandbytes", _WEIGHT, ("U8",), _TABLES, _flat, _four_bits_of_bitsandbytes),
    Encoding("bitsandbytes, int8", _WEIGHT, ("I8",), (("SCB",),), _as_it_is, _int8_of_bitsandbytes),
    Encoding("mlx-lm", _WEIGHT, ("U32",), (("scales",),), _words, _mlx),
    Encoding("compressed-tensors, NVFP4", _PACKED, ("U8",), (_SCALES[0], ("weight_global_scale",)), _halved, _nvfp4),
    Encoding("compressed-tensors, MXFP4", _PACKED, ("U8",), _SCALES[:1], _halved, _mxfp4),
    Encoding("compressed-tensors, integers", _PACKED, ("I32",), _SCALES[:1], _words, _integers),
    Encoding("ModelOpt, NVFP4", _EITHER, ("U8",), (_SCALES[0], ("weight_scale_2",)), _halved, _nvfp4),
    Encoding("Quark, MXFP4", _WEIGHT, ("U8",), _SCALES[:1], _halved, _mxfp4),
    Encoding("FP8 and int8 with scales", _EITHER, _FP8, _SCALES[1:], _as_it_is, _scaled),
    Encoding("published", ("blocks",), ("U8",), (("scales",),), _published, _mxfp4),
    Encoding(FLOATS, (*_EITHER, "blocks"), layout.FLOATS, (), _as_it_is, _floats),
)
