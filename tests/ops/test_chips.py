"""Every kernel of the portable backends fits every chip, with the launch policy for that chip.

Compiled whole for 8.0 and 12.0. What runs on 8.6 and 8.9 is what runs on 8.0, within less shared memory; on 10.0,
kernels without products are those of 12.0. So of these chips only the largest product of each kernel is compiled.
The kernels of Hopper are compiled in the tests of their ops. See compile_ahead.py for what fitting is.
"""

from math import prod

import pytest

from oscine.ops.norm import triton as norm
from tests.ops.chips import CHIPS
from tests.ops.compile_ahead import assemble_for
from tests.ops.launches import Launch, launches

PRODUCTS = ("_experts_kernel", "_route_kernel", "decode_kernel", "prefill_kernel")


def largest_products(arch: int) -> list[Launch]:
    """By the sizes of their blocks."""
    found = sorted(launches(CHIPS[arch]), key=lambda launch: prod(max(1, block) for block in launch.blocks.values()))
    largest = {launch.name: launch for launch in found}
    return [largest[name] for name in PRODUCTS]


@pytest.mark.parametrize("arch", [80, 120])
def test_every_kernel_fits(arch: int) -> None:
    found = launches(CHIPS[arch])
    assert {launch.name for launch in found} >= {*PRODUCTS, "_norm_kernel", "_norm_route_kernel", "_cut_kernel"}
    for launch in found:
        launch.compile(arch)


@pytest.mark.parametrize("arch", [86, 89])
def test_what_fits_an_a100_fits_the_smaller_chips_of_its_generation(arch: int) -> None:
    found = {launch.shape: launch for launch in launches(CHIPS[80])}
    assert found.keys() == {launch.shape for launch in launches(CHIPS[arch])}
    for launch in found.values():
        assert launch.compile(80).shared <= CHIPS[arch].shared_memory
    for launch in largest_products(80):
        assemble_for(arch, launch.compile(80))


def test_the_largest_products_fit_a_b200() -> None:
    for launch in largest_products(100):
        launch.compile(100)


def test_what_is_too_large_for_a_chip_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "LONG_SPLIT_BYTES", 0)
    [launch] = [one for one in launches(CHIPS[120]) if one.blocks.get("BLOCK_H") == norm.LONG_SPLIT_H]
    with pytest.raises(AssertionError, match="147456"):
        launch.compile(120)
