"""How contexts are divided among programs, in Triton and in Gluon, beside plain Python."""

import random
from collections.abc import Iterator
from fractions import Fraction
from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from oscine.ops.attention.hopper_decode import _split_of
from oscine.ops.attention.splits import max_total_splits, split_of
from tests.ops.child import call
from tests.ops.gluon_interpreter import run_gluon

BLOCK = 64


@triton.jit
def splits_kernel(
    out_ptr,
    lens_ptr,
    num_sequences,
    BLOCK_N: tl.constexpr,
    MIN_PARTS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    index = tl.program_id(0)
    sequence, split, splits = split_of(index, lens_ptr, num_sequences, BLOCK_N, MIN_PARTS, MAX_PARTS, MAX_SPLITS)
    tl.store(out_ptr + index * 3, sequence)
    tl.store(out_ptr + index * 3 + 1, split)
    tl.store(out_ptr + index * 3 + 2, splits)


@gluon.jit
def gluon_splits_kernel(out_ptr, lens_ptr, num_sequences, KV_HEADS: gl.constexpr, MAX_SPLITS: gl.constexpr):
    index = gl.program_id(0)
    sequence, split, splits = _split_of(index, lens_ptr, num_sequences, KV_HEADS, MAX_SPLITS)
    gl.store(out_ptr + index * 3, sequence)
    gl.store(out_ptr + index * 3 + 1, split)
    gl.store(out_ptr + index * 3 + 2, splits)


def blocks_of(lens: list[int]) -> list[int]:
    return [max(1, ceil(length / BLOCK)) for length in lens]


def split_counts(blocks: list[int], parts: int, most: int) -> list[int]:
    """The number of splits of each context."""
    return [min(ceil(Fraction(parts * own, sum(blocks))), own, most) for own in blocks]


def hopper_parts(lens: list[int], kv_heads: int, most: int) -> int:
    """The rule of hopper_decode._parts_of: a context is long with a 128th of all pages; 264 programs fit one wave."""
    blocks = blocks_of(lens)
    if sum(blocks) * kv_heads < 256 * 32:
        return 192 // kv_heads
    for parts in (256 // kv_heads, 240 // kv_heads):
        programs = [count * kv_heads for own, count in zip(blocks, split_counts(blocks, parts, most), strict=True)]
        if sum(count for own, count in zip(blocks, programs, strict=True) if 128 * own >= sum(blocks)) <= 264:
            return parts
    return 384 // kv_heads


def check(found: Tensor, lens: list[int], parts: int, most: int) -> None:
    wanted = [
        (sequence, split, count)
        for sequence, count in enumerate(split_counts(blocks_of(lens), parts, most))
        for split in range(count)
    ]
    assert [tuple(row) for row in found[: len(wanted)].tolist()] == wanted
    assert (found[len(wanted) :, 0] >= len(lens)).all()
    assert (found[len(wanted) :, 2] == 0).all()


def loads(most_sequences: int) -> Iterator[list[int]]:
    draw, limit = random.Random(0), 1_024  # pages, from which on Hopper's kernel has more parts
    yield from ([1_000] * 24, [64], [65, 0, 64], [7, 131_072], [131_072] + [1] * (most_sequences - 1))
    yield from ([limit * BLOCK - 1], [limit * BLOCK + 1])
    yield from ([BLOCK] * 10 + [(limit - 10 + more) * BLOCK] for more in (-1, 0))
    for _ in range(6):
        longest = 1 << draw.randrange(6, 18)
        yield [draw.randint(1, longest) for _ in range(draw.randint(1, 64))]


def interpret_triton() -> None:
    chosen = set()
    for lens in loads(300):  # more than are read at once
        for fewest, parts, most in ((24, 24, 24), (3, 5, 3), (24, 48, 32)):
            wanted = min(max(sum(blocks_of(lens)) // 32, fewest), parts)
            found = torch.full((max_total_splits(len(lens), parts), 3), -1, dtype=torch.int32)
            lens_S, sizes = torch.tensor(lens, dtype=torch.int32), {"MIN_PARTS": fewest, "MAX_PARTS": parts}
            splits_kernel[(len(found),)](found, lens_S, len(lens), BLOCK_N=BLOCK, **sizes, MAX_SPLITS=most)
            check(found, lens, wanted, most)
            chosen.add(wanted)
    assert {24, 32, 48} <= chosen


def interpret_gluon() -> None:
    # Of equal contexts: 5 and 6 fit with 240 programs and not with 256, 7 and 36 with neither.
    equal = [[16_384] * n + [1] * (n % 2) for n in (5, 6, 7, 8, 36)]
    small = [[131_072] + [1_024] * 23, [131_072] + [1_280] * 23]  # the short ones count in the second only
    chosen = set()
    for lens in (*loads(64), *equal, *small):
        for kv_heads, most in ((8, 32), (4, 32), (1, 3)):
            parts = hopper_parts(lens, kv_heads, most)
            found = torch.full((max_total_splits(len(lens), 384 // kv_heads), 3), -1, dtype=torch.int32)
            lens_S = torch.tensor(lens, dtype=torch.int32)
            gluon_splits_kernel[(len(found),)](found, lens_S, len(lens), KV_HEADS=kv_heads, MAX_SPLITS=most)
            check(found, lens, parts, most)
            chosen.add(parts * kv_heads)
    assert chosen == {192, 240, 256, 384}


def test_contexts_have_splits_by_their_length() -> None:
    call("tests.ops.triton_interpreter", interpret_triton)


def test_hopper_chooses_the_number_of_parts() -> None:
    run_gluon(interpret_gluon)
