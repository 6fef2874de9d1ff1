"""Runs Gluon kernels for Hopper and Blackwell on CPU tensors, and checks their results and their barriers.

    def interpret_it() -> None: ...  # a plain function of a test module, launches kernels on CPU tensors
    def test_it() -> None:
        run_gluon(interpret_it)

Kernels run as plain Python functions over torch tensors, one program after the other. The partitions of a
warp-specialised program take turns. A layout says where a value lies and never what it is, so layouts are ignored; the
compiler checks them (compile_ahead.py). Asynchronous operations happen as late as possible:

    a TMA load     destroys its target when it is issued, and fills it when somebody waits for its barrier
    wgmma          multiplies what is in shared memory when it is waited for
    tcgen05        copies and multiplies when somebody waits for a barrier that a later commit named
    a barrier      completes by its arrivals and to the byte; when all partitions wait in vain, that is an error

Shared memory begins as NaN, and reading or writing global memory outside of what a tensor's storage holds is an error.

It does not find races of threads within a partition, of programs or of kernels (so a read before gdc_wait passes),
missing proxy fences, a TMA load into a place with an earlier load that was never waited for, and slowness.
"""

from collections.abc import Callable

from tests.ops.child import call


def run_gluon(function: Callable[[], None]) -> None:
    """Calls a module-level function in a process of its own, where all kernels are interpreted."""
    call("tests.ops.gluon_interpreter.start", function)
