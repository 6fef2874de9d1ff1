"""What launches of Triton kernels share: dependent launches, and arrival counters.

A kernel that takes `PDL` calls gdc_launch_dependents first, and may then read weights. It calls gdc_wait before it
touches memory that an earlier kernel of the step writes or reads. Target.launch_options says where it is used. Every
launch sets enable_fp_fusion, as its default differs between releases of Triton.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_ARRIVALS = 8192


@functools.cache
def arrivals(device: torch.device) -> Tensor:
    """int32 [NUM_ARRIVALS] of zeros, by which the programs of one kernel find out which of them is last.

    Shared by all kernels of the device, so these must run on one stream; each leaves zeros behind.
    """
    return torch.zeros(NUM_ARRIVALS, dtype=torch.int32, device=device)


@triton.jit
def arrives_last(counter, count):
    """Whether the other programs of `count` have arrived. Then what they stored can be read past the L1 cache (".cg"),
    and the caller stores 0 into the counter."""
    tl.debug_barrier()  # the atomic of one thread publishes what other threads stored
    return tl.atomic_add(counter, 1) == count - 1


@triton.jit
def after_wait(pointer, PDL: tl.constexpr):
    """Returns `pointer` after gdc_wait. Loads through it see what the previous kernel wrote; other loads need not wait.

    The wait is declared pure. A wait with side effects would keep the results of earlier loads in registers until it
    ends. Before a pure one the compiler may copy them into shared memory.
    """
    if PDL:
        wait: tl.constexpr = "griddepcontrol.wait; mov.b32 $0, 0;"
        zero = tl.inline_asm_elementwise(wait, "=r", [], dtype=tl.int32, is_pure=True, pack=1)
        pointer += tl.multiple_of(zero, 16)  # else loads through it would be of single elements
    return pointer


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """For the kernel before this one."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def depend(PDL: tl.constexpr):
    """For a kernel that reads nothing before: lets the next kernel begin, and waits for the one before."""
    let_next_begin(PDL)
    wait(PDL)
