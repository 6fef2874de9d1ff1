"""Every kernel of the portable backends fits every chip, with the launch policy for that chip.

Compiled whole for 8.0 and 12.0. What runs on 8.6 and 8.9 is what runs on 8.0, within less shared memory; on 10.0,
kernels without products are those of 12.0. So of these chips only the largest product of each kernel is compiled.
The kernels of Hopper are compiled in the tests of their ops. See compile_ahead.py for what fitting is.
"""

from functools import cache
from math import prod

import pytest

from oscine.ops.norm import triton as norm
from tests.ops.chips import CHIPS
from tests.ops.compile_ahead import assemble_for
from tests.ops.launches import Launch, launches

PRODUCTS = ("_experts_kernel", "_route_kernel", "decode_kernel", "prefill_kernel")
OTHERS = (
    *("_norm_kernel", "_norm_route_kernel", "rope_and_write_kernel", "_sort_kernel"),
    *("_prepare_kernel", "_write_back_kernel", "_choose_kernel", "_restrict_kernel"),
    *("_scan_kernel", "_bound_kernel", "_collect_kernel", "_cut_kernel"),
)


@cache
def launched_on(arch: int) -> list[Launch]:
    return launches(CHIPS[arch])


def largest(arch: int, kernel: str) -> Launch:
    """By the sizes of its blocks."""
    named = [launch for launch in launched_on(arch) if launch.name == kernel]
    return max(named, key=lambda launch: prod(max(1, block) for block in launch.blocks.values()))


@pytest.mark.parametrize("arch", [80, 100, 120])
def test_all_kernels_are_looked_at(arch: int) -> None:
    assert {launch.name for launch in launched_on(arch)} == {*PRODUCTS, *OTHERS}


@pytest.mark.parametrize("kernel", PRODUCTS + OTHERS)
@pytest.mark.parametrize("arch", [80, 120])
def test_every_kernel_fits(arch: int, kernel: str) -> None:
    for launch in launched_on(arch):
        if launch.name == kernel:
            compiled = launch.compile(arch)
            if arch == 80:
                assert compiled.shared <= min(CHIPS[86].shared_memory, CHIPS[89].shared_memory)


@pytest.mark.parametrize("arch", [86, 89])
def test_an_a100_shows_what_runs_on_the_smaller_chips_of_its_generation(arch: int) -> None:
    assert [launch.kind for launch in launched_on(arch)] == [launch.kind for launch in launched_on(80)]
    assert [launch.blocks for launch in launched_on(arch)] == [launch.blocks for launch in launched_on(80)]
    for kernel in PRODUCTS:
        assemble_for(arch, largest(80, kernel).compile(80))


@pytest.mark.parametrize("kernel", PRODUCTS)
def test_the_largest_products_fit_a_b200(kernel: str) -> None:
    largest(100, kernel).compile(100)


def test_what_is_too_large_for_a_chip_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "LONG_SPLIT_BYTES", 0)
    [launch] = [one for one in launches(CHIPS[120]) if one.blocks.get("BLOCK_H") == norm.LONG_SPLIT_H]
    with pytest.raises(AssertionError, match="147456"):
        launch.compile(120)
