"""Messages between GPUs, on a CPU: what is compiled for Hopper, the slots, and which norms add up over ranks.

What happens between two GPUs is tested in test_comm_gpu.py.
"""

import re
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from oscine.extensions.parallel.comm.ops import NORMS, across
from oscine.extensions.parallel.comm.symmetric import SymmetricCommunicator, two_shots
from oscine.ops.comm.sums import partial_sums, row_bytes
from oscine.ops.embed import triton as embed
from oscine.ops.norm import hopper, reference
from oscine.ops.norm import triton as norm
from oscine.ops.platforms.table import choose, resolve
from oscine.ops.target import Alone, Target
from tests.ops.chips import CHIPS
from tests.ops.compile_ahead import marked
from tests.ops.launches import META, Launch, noted

HIDDEN, MAX_ROWS = 2880, 8192
RANKS = (2, 4, 8)
KERNELS = {"embed_part_kernel", "_norm_kernel", "_undivided_norm_kernel", "_norm_route_kernel"}
KERNELS |= {"all_reduce_kernel", "all_gather_kernel", "best_kernel"}
FIRST = 1 << 40  # address of rank 0's buffer; those of the others follow at the same distance


class Nowhere(SymmetricCommunicator):
    """Of GPUs that are not there: addresses are made up."""

    def _allocate(self, num_bytes: int) -> list[int]:
        self.num_bytes = num_bytes
        return [FIRST * (1 + rank) for rank in range(self.num_ranks)]


def communicator(rank: int, num_ranks: int) -> Nowhere:
    found = Nowhere(rank, num_ranks, META, None, MAX_ROWS, HIDDEN)  # type: ignore[arg-type]
    found._options = CHIPS[90].launch_options
    return found


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def run(target: Target) -> None:
    """Every kernel, at sizes on both sides of what the launch policies tell apart."""
    communicator: Any = target.communicator
    weight_H, router, bias_E = empty(HIDDEN), empty(128, HIDDEN), empty(128)
    for rows in (1, 64, 129, 1024):
        embed.embed_part(target, empty(rows, dtype=torch.int64), empty(50_272, HIDDEN), communicator.rank * 50_272)
        residual_TH = empty(rows, HIDDEN)
        for x in (empty(rows, HIDDEN), empty(rows, 12, HIDDEN), empty(rows, 4, HIDDEN, dtype=torch.float32)):
            norm.rms_norm(target, x, weight_H, 1e-5, residual_TH)
            hopper.norm_route(target, x, weight_H, 1e-5, residual_TH, router, bias_E, 4)
            if rows <= 64:
                norm.undivided_norm(target, x, weight_H, residual_TH)
        for dtype in (torch.bfloat16, torch.float32):
            communicator.all_reduce(empty(rows, HIDDEN, dtype=dtype))
        communicator.all_gather(empty(rows, 100_544 // 4, dtype=torch.float32))
        communicator.best(empty(rows, dtype=torch.float32), empty(rows, dtype=torch.int64))


@cache
def launches(num_ranks: int, rank: int = 1) -> dict[str, Launch]:
    """Those of kernels that exchange something, by everything that makes one compilation differ from another."""
    target = replace(CHIPS[90], communicator=communicator(rank, num_ranks))
    with noted(target) as found:
        run(target)
    return {
        str((launch.name, launch.signature, launch.constants, launch.attributes, launch.options)): launch
        for launch in found
        if launch.signature.get("addresses", "constexpr") != "constexpr"
    }


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("num_ranks", "every_kind"), marked(product((2, 4, 8), (False, True)), newest=[(4, False)], oldest=[(4, True)])
)
def test_kernels_push_and_poll_whole_words(num_ranks: int, every_kind: bool) -> None:
    """16 bytes at once, and one value with its id; no multicast, and no fence. Else one launch of each kernel."""
    several: dict[str, list[Launch]] = {}
    for launch in launches(num_ranks).values():
        several.setdefault(str((launch.kind, launch.message)) if every_kind else launch.name, []).append(launch)
    names = set()
    for alike in several.values():
        launch = alike[-1]
        names.add(launch.name)
        compiled = launch.compile(90)
        width = 2 if launch.name == "best_kernel" else 4
        stores = re.findall(r"st\.relaxed\.sys\.global\.(\w+)\.b32 \[at", compiled.ptx)
        loads = re.findall(r"ld\.relaxed\.sys\.global\.(\w+)\.b32 {%", compiled.ptx)
        assert set(stores) == set(loads) == {f"v{width}"}, launch.name
        assert not re.search("multimem|multicast|membar|fence", compiled.ptx), launch.name
        assert elements_per_store(compiled.ttgir), launch.name
        for consecutive, packed in elements_per_store(compiled.ttgir):
            assert consecutive % packed == 0, f"{launch.name} stores what is not consecutive"
    assert names == KERNELS


def elements_per_store(ttgir: str) -> list[tuple[int, int]]:
    """(consecutive elements of a thread, elements of a store) of each exchange."""
    layouts = dict(re.findall(r"(#\w+) = #ttg\.blocked<{sizePerThread = \[(\d+)\]", ttgir))
    exchanges = [line for line in ttgir.splitlines() if "relaxed.sys" in line]
    return [
        (
            int(layouts[re.findall(r"tensor<\d+x\w+, (#\w+)>", line)[-1]]),
            int(re.findall(r"packed_element = (\d+)", line)[0]),
        )
        for line in exchanges
    ]


def test_all_ranks_compile_the_same() -> None:
    assert launches(4, 0).keys() == launches(4, 1).keys() == launches(4, 3).keys()


@pytest.mark.parametrize("num_ranks", RANKS)
def test_every_rank_has_a_slot_of_its_own_at_every_other(num_ranks: int) -> None:
    """What one writes at another lies where the other expects it, and nothing overlaps."""
    ranks = [communicator(rank, num_ranks) for rank in range(num_ranks)]
    for owner in ranks:
        used = []
        for name, (addresses, slot, half) in owner._slots.items():
            assert half <= slot
            senders = [sender for sender in ranks if sender is not owner]
            for index, sender in enumerate(senders):
                others = [other for other in range(num_ranks) if other != sender.rank]
                address = sender._slots[name].addresses[1 + others.index(owner.rank)]
                assert address == addresses[0] + index * slot
                used.append((address, address + slot))
        begins, ends = zip(*sorted(used), strict=True)
        assert begins[0] == FIRST * (1 + owner.rank)
        assert begins[1:] == ends[:-1]
        assert ends[-1] - begins[0] == owner.num_bytes
        assert all(begin % 16 == 0 for begin in begins)


def test_two_ranks_always_use_one_shot() -> None:
    assert not two_shots(2, 1 << 40)
    assert not two_shots(3, 1 << 40)
    assert [two_shots(ranks, 200 << 10) for ranks in (4, 7, 8, 16)] == [False, False, True, True]
    assert two_shots(4, 384 << 10)


def test_more_rows_than_slots_hold_are_refused() -> None:
    target = replace(CHIPS[90], communicator=communicator(0, 2))
    assert partial_sums(target, "experts", MAX_ROWS, HIDDEN)["RANKS"] == 2
    with pytest.raises(AssertionError, match="more rows"):
        partial_sums(target, "experts", MAX_ROWS + 1, HIDDEN)
    assert partial_sums(CHIPS[90], "experts", MAX_ROWS + 1, HIDDEN)["RANKS"] == 1


def test_rows_begin_at_16_bytes() -> None:
    assert [row_bytes(hidden) for hidden in (1, 8, 9, 2880)] == [16, 16, 32, 5760]


def test_norms_that_add_up_over_ranks_are_left_alone() -> None:
    ops = {name: object() for name in (*NORMS, "lm_head", "embed_part", "best_of_few")}
    assert across(ops, Alone(), NORMS).keys().isdisjoint(NORMS)  # type: ignore[arg-type]
    assert {*NORMS} - across(ops, Alone(), ["rms_norm"]).keys() == {"rms_norm"}  # type: ignore[arg-type]
    target = replace(CHIPS[90], communicator=communicator(0, 2))
    resolved = resolve(target, choose("hopper"))
    with noted(target) as found:
        resolved.embed(empty(3, dtype=torch.int64), empty(50, HIDDEN))
    assert [launch.name for launch in found] == ["embed_part_kernel"]
    assert resolved.rms_norm.func is norm.rms_norm  # type: ignore[attr-defined]
    assert resolve(target, choose("cpu")).rms_norm is not reference.rms_norm
