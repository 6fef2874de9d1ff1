"""How contexts are divided among programs, in Triton and in Gluon, beside plain Python."""

import dataclasses
import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from oscine.ops.attention import hopper
from oscine.ops.attention.hopper_decode import _split_of
from oscine.ops.attention.splits import max_total_splits, split_of
from tests.ops.child import call
from tests.ops.chips import CHIPS
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
def gluon_splits_kernel(
    out_ptr,
    lens_ptr,
    num_sequences,
    RESIDENT: gl.constexpr,
    KV_HEADS: gl.constexpr,
    MAX_SPLITS: gl.constexpr,
):
    index = gl.program_id(0)
    sequence, split, splits = _split_of(index, lens_ptr, num_sequences, RESIDENT, KV_HEADS, MAX_SPLITS)
    gl.store(out_ptr + index * 3, sequence)
    gl.store(out_ptr + index * 3 + 1, split)
    gl.store(out_ptr + index * 3 + 2, splits)


def blocks_of(lens: list[int]) -> list[int]:
    return [max(1, ceil(length / BLOCK)) for length in lens]


def split_counts(blocks: list[int], parts: int, most: int) -> list[int]:
    """The number of splits of each context."""
    return [min(ceil(Fraction(parts * own, sum(blocks))), own, most) for own in blocks]


def hopper_parts(lens: list[int], sms: int, kv_heads: int, most: int) -> tuple[int, str]:
    """The rule of hopper_decode._parts_of, and its case: a context is long with a 128th of all pages."""
    blocks, resident = blocks_of(lens), 2 * sms
    small, fewer, full, largest = (resident * share // 33 // kv_heads for share in (24, 30, 32, 48))
    if sum(blocks) < full * 32:
        return small, "small"
    for parts, case in ((full, "full"), (fewer, "fewer")):
        counts = split_counts(blocks, parts, most)
        if kv_heads * sum(c for own, c in zip(blocks, counts, strict=True) if 128 * own >= sum(blocks)) <= resident:
            return parts, case
    return largest, "largest"


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
    # Of equal contexts on 132 SMs: 5, 6 and 10 fit with the fewer parts only, 7 and 36 with neither, 11 fill a wave.
    equal = [[16_384] * n + [1] * (n % 2) for n in (5, 6, 7, 8, 10, 11, 17, 36)]
    beside = [[131_072] + [length] * 23 for length in (1_024, 1_216, 1_280)]  # only the last of these are long
    found_cases = set()
    for lens in (*loads(64), *equal, *beside):
        for sms, kv_heads in ((132, 8), (132, 4), (114, 8), (3, 1)):
            target = dataclasses.replace(CHIPS[90], sm_count=sms)
            tiling = hopper.decode_tiling(target, kv_heads, None)
            most = tiling["MAX_SPLITS"]
            parts, case = hopper_parts(lens, sms, kv_heads, most)
            found = torch.full((max_total_splits(len(lens), tiling["MAX_PARTS"]), 3), -1, dtype=torch.int32)
            sizes = {"RESIDENT": tiling["RESIDENT"], "KV_HEADS": kv_heads, "MAX_SPLITS": most}
            gluon_splits_kernel[(len(found),)](found, torch.tensor(lens, dtype=torch.int32), len(lens), **sizes)
            check(found, lens, parts, most)
            found_cases.add((sms, kv_heads, case))
    wanted = product(((132, 8), (132, 4), (114, 8)), ("small", "full", "fewer", "largest"))
    assert not {(sms, kv_heads, case) for (sms, kv_heads), case in wanted} - found_cases


def test_contexts_have_splits_by_their_length() -> None:
    call("tests.ops.triton_interpreter", interpret_triton)


def test_hopper_chooses_the_number_of_parts() -> None:
    run_gluon(interpret_gluon)
