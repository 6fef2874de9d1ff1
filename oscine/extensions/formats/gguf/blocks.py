"""The values of tensors that GGUF stores in blocks: as float32, or as MXFP4 in the order of published checkpoints.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. The arithmetic is float32's, so nothing
is lost. It is numpy's, in small pieces: their memory is reused, and no threads wait for each other.

Shape suffixes: N blocks, B bytes of one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oscine.extensions.formats.gguf.file import Stored

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Read = Callable[[Bytes], Floats]  # [N, B] -> [N, values of a block]
MXFP4, MXFP4_OF_OLLAMA = "MXFP4", "MXFP4 of Ollama"
_PIECE = 1 << 13  # blocks
_EIGHT = np.arange(8, dtype=np.uint8)
_IQ4_NL = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32)


def floats(stored: Stored, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values in the tensor's shape. bfloat16 and float32 stay as stored, and mapped; other types become `dtype`."""
    if stored.type.name in _PLAIN:
        found = torch.from_numpy(stored.raw).view(_PLAIN[stored.type.name]).view(stored.shape)
        return found.to(dtype) if found.dtype == torch.float16 else found
    blocks_NB, read = stored.raw.reshape(-1, stored.type.bytes), READ[stored.type.name]
    out = torch.empty(len(blocks_NB), stored.type.values, dtype=dtype)
    with np.errstate(all="ignore"):  # a broken file may hold any number
        for piece in _pieces(len(out)):
            out[piece] = torch.from_numpy(read(blocks_NB[piece]))
    stored.release()
    return out.view(stored.shape)


def mxfp4_scales(stored: Stored) -> Tensor:
    """The scales: [experts, rows, columns / 32] uint8."""
    scales = torch.from_numpy(_mxfp4(stored)[..., 0].copy())
    stored.release()
    return scales


def mxfp4_blocks(*parts: Stored) -> Tensor:
    """The blocks: [experts, rows, columns / 32, 16] uint8. The low nibble of byte i is value 2 * i of its block.

    Rows of several tensors are interleaved; their shapes are equal.
    """
    experts, rows, columns, _ = _mxfp4(parts[0]).shape
    out = np.empty((experts * rows, len(parts), columns, 2, 8), np.uint8)
    for number, part in enumerate(parts):
        blocks = _mxfp4(part).reshape(-1, columns, part.type.bytes)[..., 1:]
        for piece in _pieces(len(out), columns):
            _reorder(blocks[piece], out[piece, number], ours=part.type.name == MXFP4_OF_OLLAMA)
        part.release()
    return torch.from_numpy(out).view(experts, rows * len(parts), columns, 16)


def _reorder(blocks: Bytes, out: Bytes, *, ours: bool) -> None:
    """The low nibbles of a block are its first 16 values, the high nibbles the others: of two bytes, a byte each."""
    if ours:
        out[:] = blocks.reshape(out.shape)
        return
    pairs = np.ascontiguousarray(blocks).view(np.uint16)
    out[..., 0, :] = (pairs & 15) | ((pairs >> 4) & 0xF0)
    pairs >>= 4
    out[..., 1, :] = (pairs & 15) | ((pairs >> 4) & 0xF0)


def _mxfp4(stored: Stored) -> Bytes:
    """[experts, rows, columns / 32, bytes of a block]."""
    experts, rows, columns = stored.shape
    return stored.raw.reshape(experts, rows, columns // stored.type.values, stored.type.bytes)


def _pieces(length: int, blocks: int = 1) -> Iterator[slice]:
    """Slices of `length` rows with at most _PIECE blocks each. `blocks`: blocks per row."""
    step = max(1, _PIECE // blocks)
    return (slice(start, start + step) for start in range(0, length, step))


def _half(blocks_NB: Bytes, at: int) -> Floats:
    """The half-precision number at byte `at` of each block, [N, 1]."""
    return blocks_NB[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed_NB: Bytes) -> Bytes:
    """All low nibbles, then all high nibbles."""
    return np.concatenate((packed_NB & 15, packed_NB >> 4), axis=1)


def _fifth_bits(blocks_NB: Bytes, at: int) -> Bytes:
    """16 where bit i of the 32 bits at byte `at` is set, [N, 32]."""
    bits: Any = (blocks_NB[:, at : at + 4, None] >> _EIGHT) & 1
    found: Bytes = (bits << 4).reshape(-1, 32)
    return found


def _q8_0(blocks_NB: Bytes) -> Floats:
    return blocks_NB[:, 2:].view(np.int8) * _half(blocks_NB, 0)


def _q4_0(blocks_NB: Bytes) -> Floats:
    return (_nibbles(blocks_NB[:, 2:]) - np.float32(8)) * _half(blocks_NB, 0)


def _q4_1(blocks_NB: Bytes) -> Floats:
    return _nibbles(blocks_NB[:, 4:]) * _half(blocks_NB, 0) + _half(blocks_NB, 2)


def _q5_0(blocks_NB: Bytes) -> Floats:
    values = _nibbles(blocks_NB[:, 6:]) | _fifth_bits(blocks_NB, 2)
    return (values - np.float32(16)) * _half(blocks_NB, 0)


def _q5_1(blocks_NB: Bytes) -> Floats:
    values = _nibbles(blocks_NB[:, 8:]) | _fifth_bits(blocks_NB, 4)
    return values * _half(blocks_NB, 0) + _half(blocks_NB, 2)


def _iq4_nl(blocks_NB: Bytes) -> Floats:
    return _IQ4_NL[_nibbles(blocks_NB[:, 2:])] * _half(blocks_NB, 0)


def _q4_k(blocks_NB: Bytes) -> Floats:
    return _with_minima(blocks_NB, _nibbles_of_quarters(blocks_NB[:, 16:]))


def _q5_k(blocks_NB: Bytes) -> Floats:
    fifth: Any = (blocks_NB[:, None, 16:48] >> _EIGHT[:, None]) & 1
    return _with_minima(blocks_NB, _nibbles_of_quarters(blocks_NB[:, 48:]) | (fifth << 4))


def _nibbles_of_quarters(packed_NB: Bytes) -> Bytes:
    """[N, 8, 32]: of each 32 bytes the low nibbles, then the high ones."""
    packed = packed_NB.reshape(-1, 4, 1, 32)
    found: Bytes = np.concatenate((packed & 15, packed >> 4), axis=2).reshape(-1, 8, 32)
    return found


def _with_minima(blocks_NB: Bytes, values: Bytes) -> Floats:
    """Twelve bytes hold eight scales and eight minima of six bits each."""
    low, middle, high = (blocks_NB[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), axis=1) * _half(blocks_NB, 0)
    minima = np.concatenate((middle & 63, (high >> 4) | (middle >> 6 << 4)), axis=1) * _half(blocks_NB, 2)
    found: Floats = values * scales[:, :, None] - minima[:, :, None]
    return found.reshape(-1, 256)


def _q6_k(blocks_NB: Bytes) -> Floats:
    low, high = blocks_NB[:, :128].reshape(-1, 2, 64), blocks_NB[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.concatenate((low & 15, low >> 4), axis=2).reshape(-1, 2, 4, 32)
    values = (low | (((high >> _EIGHT[::2, None]) & 3) << 4)).reshape(-1, 16, 16) - np.float32(32)
    scales = blocks_NB[:, 192:208].view(np.int8) * _half(blocks_NB, 208)
    found: Floats = values * scales[:, :, None]
    return found.reshape(-1, 256)


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
MXFP4_TYPES = (MXFP4, MXFP4_OF_OLLAMA)
