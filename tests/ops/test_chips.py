"""Every kernel that a portable model launches fits every chip, by the launch policy for that chip.

Kernels without products are the same instructions on all chips that launch dependent kernels, and on all that do not;
so is everything on the chips of capability 8. There the PTX of one chip is assembled for the others. The kernels of
Hopper are compiled for it in the tests of their ops.
"""

import pytest

from tests.ops.chips import CHIPS
from tests.ops.compile_ahead import assemble_for
from tests.ops.launches import launches


@pytest.mark.parametrize(("arch", "others"), [(80, (86, 89)), (120, (100,))])
def test_every_kernel_fits(arch: int, others: tuple[int, ...]) -> None:
    everything = {other: {launch.shape: launch for launch in launches(CHIPS[other])} for other in (arch, *others)}
    compiled = {shape: launch.compile(arch) for shape, launch in everything[arch].items()}
    for other in others:
        for shape, launch in everything[other].items():
            if shape in compiled and (other < 90 or not launch.multiplies):
                assemble_for(other, compiled[shape])
            else:
                launch.compile(other)
