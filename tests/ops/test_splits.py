"""How contexts are divided among programs, in Triton and in Gluon, beside plain Python."""

import random
from collections.abc import Callable
from fractions import Fraction
from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from oscine.ops.attention.hopper_decode import MIN_PART_PAGES, _split_of
from oscine.ops.attention.splits import max_total_splits, split_of
from tests.ops.child import call
from tests.ops.gluon_interpreter import run_gluon

BLOCK = 64
Run = Callable[[Tensor, Tensor, int, int, int], None]  # (out, lens, short parts, parts, most)


@triton.jit
def splits_kernel(
    out_ptr, lens_ptr, num_sequences, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, MAX_SPLITS: tl.constexpr
):
    index = tl.program_id(0)
    sequence, split, splits = split_of(index, lens_ptr, num_sequences, BLOCK_N, PARTS, MAX_SPLITS)
    tl.store(out_ptr + index * 3, sequence)
    tl.store(out_ptr + index * 3 + 1, split)
    tl.store(out_ptr + index * 3 + 2, splits)


@gluon.jit
def gluon_splits_kernel(
    out_ptr, lens_ptr, num_sequences, SHORT_PARTS: gl.constexpr, PARTS: gl.constexpr, MAX_SPLITS: gl.constexpr
):
    index = gl.program_id(0)
    sequence, split, splits = _split_of(index, lens_ptr, num_sequences, SHORT_PARTS, PARTS, MAX_SPLITS)
    gl.store(out_ptr + index * 3, sequence)
    gl.store(out_ptr + index * 3 + 1, split)
    gl.store(out_ptr + index * 3 + 2, splits)


def expected(lens: list[int], short: int, parts: int, most: int) -> list[tuple[int, int, int]]:
    blocks = [max(1, ceil(length / BLOCK)) for length in lens]
    if sum(blocks) < MIN_PART_PAGES.value * parts:
        parts = short
    counts = [min(ceil(Fraction(parts * own, sum(blocks))), own, most) for own in blocks]
    return [(sequence, split, count) for sequence, count in enumerate(counts) for split in range(count)]


def check(run: Run, most_sequences: int, *, fewer_for_short: bool) -> None:
    """`fewer_for_short`: short contexts have fewer parts."""
    draw, limit = random.Random(0), 32 * MIN_PART_PAGES.value  # of 32 parts
    loads = [[1_000] * 24, [64], [65, 0, 64], [7, 131_072], [131_072] + [1] * (most_sequences - 1)]
    loads += [[limit * BLOCK - 1], [limit * BLOCK + 1]]
    loads += [[BLOCK] * 10 + [(limit - 10 + more) * BLOCK] for more in (-1, 0)]
    for _ in range(6):
        longest = 1 << draw.randrange(6, 18)
        loads.append([draw.randint(1, longest) for _ in range(draw.randint(1, 64))])
    for lens in loads:
        for short, parts, most in ((24, 24, 24), (3, 5, 3), (24, 32, 32)) if len(lens) < 64 else ((36, 48, 32),):
            short = short if fewer_for_short else parts
            wanted = expected(lens, short, parts, most)
            assert len(wanted) <= max_total_splits(len(lens), parts)
            found = torch.full((max_total_splits(len(lens), parts), 3), -1, dtype=torch.int32)
            run(found, torch.tensor(lens, dtype=torch.int32), short, parts, most)
            assert [tuple(row) for row in found[: len(wanted)].tolist()] == wanted
            assert (found[len(wanted) :, 0] >= len(lens)).all()
            assert (found[len(wanted) :, 2] == 0).all()


def interpret_triton() -> None:
    def run(out: Tensor, lens: Tensor, short: int, parts: int, most: int) -> None:
        splits_kernel[(len(out),)](out, lens, len(lens), BLOCK_N=BLOCK, PARTS=parts, MAX_SPLITS=most)

    check(run, 300, fewer_for_short=False)  # more than are read at once


def interpret_gluon() -> None:
    def run(out: Tensor, lens: Tensor, short: int, parts: int, most: int) -> None:
        gluon_splits_kernel[(len(out),)](out, lens, len(lens), SHORT_PARTS=short, PARTS=parts, MAX_SPLITS=most)

    check(run, 64, fewer_for_short=True)


def test_contexts_have_splits_by_their_length() -> None:
    call("tests.ops.triton_interpreter", interpret_triton)


def test_hopper_has_fewer_parts_of_short_contexts() -> None:
    run_gluon(interpret_gluon)
