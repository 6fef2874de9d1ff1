"""The next token of rows that set a temperature and allowed tokens at most, in C. Their logits are never stored."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from oscine.ops.choose import few
from oscine.ops.interface import Chooser, LmHead, Sample, SamplingBatch
from oscine.ops.native.library import check, library
from oscine.ops.native.weights import BLOCK, PackedDense, few_logits, matrix
from oscine.ops.target import CpuWeights, Target

LEAST_BYTES = 64 << 20  # of a head that has a screen: it does not fit a cache


def chooser(target: Target, lm_head: LmHead, sample: Sample) -> Chooser:
    communicator = target.communicator

    def choose(x_NH: Tensor, weight_VH: Any, prepared: Screen | None, sampling: SamplingBatch) -> Tensor:
        return communicator.best(*best(x_NH, weight_VH, sampling, rank=communicator.rank, screen=prepared))

    return Chooser(prepare, partial(prepared_bytes, target.cpu_weights), choose, restricts=True)


@dataclass(frozen=True, slots=True)
class Screen:
    """An int8 head in 4 bits: native/screen.c."""

    packed: Tensor  # uint8
    dither: Tensor  # float32 [H], padded to whole blocks


def prepare(weight_VH: Any) -> Screen | None:
    """None for heads that are small or not in int8, and for weights that are not finite."""
    if not isinstance(weight_VH, PackedDense) or not (num_bytes := prepared_bytes("int8", *weight_VH.shape)):
        return None
    num_rows, blocks = weight_VH.shape[0], -(-weight_VH.shape[1] // BLOCK)
    drawn = torch.randint(1 << 16, (blocks * BLOCK,), generator=torch.Generator().manual_seed(0))
    screen = Screen(torch.empty(num_bytes, dtype=torch.uint8), (drawn + 0.5) / (1 << 16))
    addresses = weight_VH.packed.data_ptr(), screen.dither.data_ptr(), screen.packed.data_ptr()
    return None if library().oscine_screen(*addresses, num_rows, blocks) else screen


def prepared_bytes(kind: CpuWeights, vocab: int, hidden: int) -> int:
    """Of the screen of a head of this kind; 0 where there is none."""
    blocks = -(-vocab // 8) * -(-hidden // BLOCK)  # of 8 rows: 8 scales of two bytes in int8, of one in int4
    if kind != "int8" or blocks * (16 + 8 * BLOCK) < LEAST_BYTES:
        return 0
    return blocks * (8 + 4 * BLOCK)


def best(
    x_NH: Tensor,
    weight_VH: Any,
    sampling: SamplingBatch,
    *,
    rank: int = 0,
    tokens_V: Tensor | None = None,
    screen: Screen | None = None,
) -> tuple[Tensor, Tensor]:
    """The best scores [N], and their tokens, int64 [N].

    `tokens_V`: the token of each row of the head, int64, contiguous; then nothing is masked. Without it, they begin at
    `rank` times the rows.
    """
    num_rows, (head, kind, vocab, hidden) = x_NH.shape[0], matrix(weight_VH)
    values_N, ids_N = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    columns = sampling.temperature_N, sampling.seed_N, sampling.position_N
    drawn = (None, None, None) if sampling.greedy else [column.data_ptr() for column in columns]
    masks = _allowed(sampling) if tokens_V is None else (None, None, 0)
    screened = (None, None) if screen is None else (screen.packed.data_ptr(), screen.dither.data_ptr())
    inputs = x_NH.data_ptr(), head, kind, *drawn, *masks, None if tokens_V is None else tokens_V.data_ptr(), *screened
    outputs = values_N.data_ptr(), ids_N.data_ptr()
    check(library().oscine_choose(*inputs, *outputs, rank * vocab, num_rows, vocab, hidden))
    return values_N, ids_N


def _allowed(sampling: SamplingBatch) -> tuple[int | None, int | None, int]:
    masks_KW, row_N = sampling.allowed_KW, sampling.allowed_row_N
    if masks_KW is None or row_N is None:
        return None, None, 0
    return masks_KW.data_ptr(), row_N.data_ptr(), masks_KW.shape[1]


def _logits(x_KH: Tensor, weight_VH: Tensor | PackedDense, few_KA: Tensor) -> Tensor:
    if isinstance(weight_VH, PackedDense):
        return few_logits(x_KH, weight_VH, few_KA)
    return few.logits(x_KH, weight_VH, few_KA)


choose_few, best_of_few = few.choices(_logits)
