"""Every kernel of the portable backends fits every chip, with the launch policy for that chip.

Launches have the widths of both published models. Kernels are compiled for compute capability 8.0. Chips of 8.6, 8.7
and 8.9 run the PTX of 8.0, and 12.1 that of 12.0, so for these only the assembler runs again, which counts the
registers. 8.6 has the memory of 8.9, and 8.7 that of 8.0, so the default run leaves them out. It compiles the largest
launch of each kernel for 8.0, and of each product kernel for 10.0, 12.0 and AMD. The kernels of Hopper are compiled in
the tests of their ops. compile_ahead.py says what fitting means.
"""

from functools import cache
from math import prod

import pytest

from oscine.ops.norm import triton as norm
from tests.ops.chips import AMD_CHIPS, CHIPS
from tests.ops.compile_ahead import assemble_for
from tests.ops.launches import Launch, launches

PRODUCTS = ("_experts_kernel", "_route_kernel", "decode_kernel", "prefill_kernel")
OTHERS = (
    *("_norm_kernel", "_norm_route_kernel", "rope_and_write_kernel", "_sort_kernel"),
    *("_prepare_kernel", "_accept_kernel", "_choose_kernel", "_restrict_kernel"),
    *("_scan_kernel", "_bound_kernel", "_collect_kernel", "_cut_kernel"),
)
FAMILIES = {80: (86, 87, 89), 100: (), 103: (), 120: (121,)}  # chip -> chips that run the same PTX


@cache
def launched_on(arch: int) -> list[Launch]:
    return launches(CHIPS[arch])


@cache
def launched_on_amd(architecture: str) -> list[Launch]:
    return launches(AMD_CHIPS[architecture])


def size(launch: Launch) -> int:
    return prod(max(1, block) for block in launch.blocks.values())


def largest(arch: int, kernel: str) -> Launch:
    """The launch of a kernel with the largest blocks."""
    return max((launch for launch in launched_on(arch) if launch.name == kernel), key=size)


@pytest.mark.long
@pytest.mark.parametrize("arch", [80, 100, 120])
def test_the_list_of_kernels_is_complete(arch: int) -> None:
    assert {launch.name for launch in launched_on(arch)} == {*PRODUCTS, *OTHERS}


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize("kernel", [*PRODUCTS, *OTHERS])
@pytest.mark.parametrize(("arch", "relatives"), FAMILIES.items())
def test_every_kernel_fits(arch: int, relatives: tuple[int, ...], kernel: str) -> None:
    """The kernel fits the chip and relatives of its family."""
    for launch in launched_on(arch):
        if launch.name == kernel:
            compiled = launch.compile(arch)
            for relative in relatives:
                assemble_for(relative, compiled)


@pytest.mark.long
@pytest.mark.parametrize(("arch", "relative"), [(arch, chip) for arch, chips in FAMILIES.items() for chip in chips])
def test_chips_of_a_family_launch_the_same_kernels(arch: int, relative: int) -> None:
    assert [launch.kind for launch in launched_on(relative)] == [launch.kind for launch in launched_on(arch)]
    assert [launch.blocks for launch in launched_on(relative)] == [launch.blocks for launch in launched_on(arch)]


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize("kernel", [*PRODUCTS, *OTHERS])
@pytest.mark.parametrize("architecture", AMD_CHIPS)
def test_every_kernel_fits_amd(architecture: str, kernel: str) -> None:
    found = [launch for launch in launched_on_amd(architecture) if launch.name == kernel]
    assert found
    for launch in found:
        launch.compile_for_amd(architecture)


@pytest.mark.compiles
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_the_largest_products_fit_the_smaller_chip_of_amd(kernel: str) -> None:
    found = [launch for launch in launched_on_amd("gfx942") if launch.name == kernel]
    max(found, key=size).compile_for_amd("gfx942")


@pytest.mark.compiles
@pytest.mark.parametrize("kernel", [*PRODUCTS, *OTHERS])
def test_the_largest_launches_fit_chips_before_hopper(kernel: str) -> None:
    assemble_for(89, largest(80, kernel).compile(80))


@pytest.mark.compiles
@pytest.mark.parametrize("arch", [100, 120])
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_the_largest_products_fit_chips_of_blackwell(arch: int, kernel: str) -> None:
    """And they use the tensor cores; prompts those of 10.x that have a memory of their own (tcgen05)."""
    compiled = largest(arch, kernel).compile(arch)
    in_tensor_memory = arch == 100 and kernel in ("prefill_kernel", "_experts_kernel")
    assert ("tcgen05.mma" if in_tensor_memory else "mma.sync") in compiled.ptx


@pytest.mark.compiles
def test_what_is_too_large_for_a_chip_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "LONG_SPLIT_BYTES", 0)
    [launch] = [one for one in launches(CHIPS[120]) if one.blocks.get("BLOCK_H") == norm.LONG_SPLIT_H]
    with pytest.raises(AssertionError, match="147456"):
        launch.compile(120)
