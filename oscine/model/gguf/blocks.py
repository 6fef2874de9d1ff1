"""The values of tensors that GGUF stores in blocks: as float32, or as MXFP4 in the order of published checkpoints.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. All arithmetic is that of the format, in
float32, so nothing is lost. Shape suffixes: N blocks, B bytes of one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from oscine.model.gguf.file import Stored

Read = Callable[[Tensor], Tensor]  # [N, B] uint8 -> [N, values of a block] float32
_BLOCKS_AT_ONCE = 1 << 17  # so that little is held beside the result
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4, MXFP4_OF_OLLAMA = "MXFP4", "MXFP4 of Ollama"


def floats(stored: Stored) -> Tensor:
    """In the shape of the tensor: bfloat16 as it is, everything else as float32. Floats are mapped, not copied."""
    raw = torch.from_numpy(stored.raw)
    if stored.type.name in _PLAIN:
        found = raw.view(_PLAIN[stored.type.name]).view(stored.shape)
        return found.float() if found.dtype == torch.float16 else found
    blocks_NB, read = raw.view(-1, stored.type.bytes), READ[stored.type.name]
    out = torch.empty(len(blocks_NB), stored.type.values)
    for source, target in zip(blocks_NB.split(_BLOCKS_AT_ONCE), out.split(_BLOCKS_AT_ONCE), strict=True):
        target.copy_(read(source))
    return out.view(stored.shape)


def mxfp4_scales(stored: Stored) -> Tensor:
    """[..., columns / 32] uint8."""
    return _mxfp4(stored)[..., 0]


def mxfp4_blocks(stored: Stored) -> Tensor:
    """[..., columns / 32, 16] uint8; the low nibble of byte i is value 2 * i of its block."""
    packed = _mxfp4(stored)[..., 1:]
    if stored.type.name == MXFP4_OF_OLLAMA:
        return packed
    # The low nibbles of a block are its first 16 values, the high nibbles the others.
    even, odd = packed[..., ::2], packed[..., 1::2]
    first = (even & 15) | (odd << 4)
    return torch.cat((first, (even >> 4) | (odd & 0xF0)), dim=-1)


def _mxfp4(stored: Stored) -> Tensor:
    *rows, columns = stored.shape
    return torch.from_numpy(stored.raw).view(*rows, columns // stored.type.values, stored.type.bytes)


def _half(blocks_NB: Tensor, at: int) -> Tensor:
    """The half-precision number at byte `at` of each block, [N, 1]."""
    return blocks_NB[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed_NB: Tensor) -> Tensor:
    """All low ones, then all high ones."""
    return torch.cat((packed_NB & 15, packed_NB >> 4), dim=1)


def _fifth_bits(blocks_NB: Tensor, at: int) -> Tensor:
    """16 where bit i of the 32 bits at byte `at` is set, [N, 32] uint8."""
    bits = (blocks_NB[:, at : at + 4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(1) << 4


def _q8_0(blocks_NB: Tensor) -> Tensor:
    return blocks_NB[:, 2:].view(torch.int8) * _half(blocks_NB, 0)


def _q4_0(blocks_NB: Tensor) -> Tensor:
    return (_nibbles(blocks_NB[:, 2:]).float() - 8) * _half(blocks_NB, 0)


def _q4_1(blocks_NB: Tensor) -> Tensor:
    return _nibbles(blocks_NB[:, 4:]) * _half(blocks_NB, 0) + _half(blocks_NB, 2)


def _q5_0(blocks_NB: Tensor) -> Tensor:
    values = _nibbles(blocks_NB[:, 6:]) | _fifth_bits(blocks_NB, 2)
    return (values.float() - 16) * _half(blocks_NB, 0)


def _q5_1(blocks_NB: Tensor) -> Tensor:
    values = _nibbles(blocks_NB[:, 8:]) | _fifth_bits(blocks_NB, 4)
    return values * _half(blocks_NB, 0) + _half(blocks_NB, 2)


def _iq4_nl(blocks_NB: Tensor) -> Tensor:
    return torch.tensor(_IQ4_NL, dtype=torch.float32)[_nibbles(blocks_NB[:, 2:]).long()] * _half(blocks_NB, 0)


def _scales_and_minima(packed_NB: Tensor) -> tuple[Tensor, Tensor]:
    """Twelve bytes hold eight scales and eight minima of six bits each, [N, 8, 1]."""
    low, middle, high = packed_NB.split(4, dim=1)
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), dim=1)
    return scales.unsqueeze(2), minima.unsqueeze(2)


def _q4_k(blocks_NB: Tensor) -> Tensor:
    return _with_minima(blocks_NB, _nibbles_of_halves(blocks_NB[:, 16:]))


def _q5_k(blocks_NB: Tensor) -> Tensor:
    fifth = (blocks_NB[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return _with_minima(blocks_NB, _nibbles_of_halves(blocks_NB[:, 48:]) | (fifth << 4))


def _nibbles_of_halves(packed_NB: Tensor) -> Tensor:
    """[N, 8, 32]: of each 32 bytes the low nibbles, then the high ones."""
    packed = packed_NB.unflatten(1, (4, 1, 32))
    return torch.cat((packed & 15, packed >> 4), dim=2).flatten(1, 2)


def _with_minima(blocks_NB: Tensor, values: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks_NB[:, 4:16])
    scale, minimum = _half(blocks_NB, 0).unsqueeze(2), _half(blocks_NB, 2).unsqueeze(2)
    return (values * (scale * scales) - minimum * minima).flatten(1)


def _q6_k(blocks_NB: Tensor) -> Tensor:
    low, high = blocks_NB[:, :128].unflatten(1, (2, 64)), blocks_NB[:, 128:192].unflatten(1, (2, 1, 32))
    low = torch.cat((low & 15, low >> 4), dim=2).unflatten(2, (4, 32))
    high = (high >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]) & 3
    values = (low | (high << 4)).flatten(1).float() - 32
    scales = blocks_NB[:, 192:208].view(torch.int8) * _half(blocks_NB, 208)
    return (values.unflatten(1, (16, 16)) * scales.unsqueeze(2)).flatten(1)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
READ: dict[str, Read] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "IQ4_NL": _iq4_nl,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
DENSE = (*_PLAIN, *READ)  # types of everything but experts
EXPERTS = (MXFP4, MXFP4_OF_OLLAMA)
