"""The interpreter of Gluon kernels finds the errors in a kernel: here, in one that copies a matrix by TMA."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.language.extra.cuda import gdc_wait

from oscine.ops.linear.hopper_stream import descriptor
from tests.ops.gluon_interpreter import run_gluon
from tests.ops.gluon_interpreter.ptx import run_ptx

BLOCKED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
def copy_kernel(matrix, out_ptr, limit, SKIP: gl.constexpr, EXTRA: gl.constexpr):
    """Copies 64 x 64 boxes, two programs beside each other; SKIP: without waiting; EXTRA: bytes that never come."""
    gdc_wait()
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], matrix.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    mbarrier.expect(arrived, matrix.block_type.nbytes + EXTRA)
    tma.async_copy_global_to_shared(matrix, [0, gl.program_id(0) * 64], arrived, tile)
    if not SKIP:
        mbarrier.wait(arrived, 0)
    row = gl.arange(0, 64, gl.SliceLayout(1, BLOCKED))
    column = gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(0, BLOCKED))
    gl.store(out_ptr + row[:, None] * 128 + column[None, :], tile.load(BLOCKED), (row < limit)[:, None])


@gluon.jit
def square_kernel(matrix, out_ptr, EARLY: gl.constexpr):
    """out = matrix matrix; EARLY: the left operand is overwritten before the product is waited for."""
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], matrix.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    mbarrier.expect(arrived, matrix.block_type.nbytes)
    tma.async_copy_global_to_shared(matrix, [0, 0], arrived, tile)
    mbarrier.wait(arrived, 0)
    product = warpgroup_mma(tile, tile, gl.zeros([64, 64], gl.float32, MMA), is_async=EARLY)
    if EARLY:
        tile.store(gl.zeros([64, 64], gl.bfloat16, BLOCKED))
        fence_async_shared()
        product = product.result()
    row = gl.arange(0, 64, gl.SliceLayout(1, MMA))
    column = gl.arange(0, 64, gl.SliceLayout(0, MMA))
    gl.store(out_ptr + row[:, None] * 64 + column[None, :], product)


def find_what_is_wrong() -> None:
    matrix = torch.randn(50, 100).bfloat16()
    matrix = torch.cat((matrix, torch.zeros(50, 4).bfloat16()), 1)  # rows of whole 16 bytes
    box = descriptor(matrix, [64, 64])

    def copied(limit: int, *, skip: bool = False, extra: int = 0) -> torch.Tensor:
        out = torch.full((64, 128), 7.0)
        copy_kernel[(2,)](box, out, limit, SKIP=skip, EXTRA=extra)
        return out

    out = copied(60)
    assert torch.equal(out[:50, :104], matrix.float())
    assert not out[50:60].any()  # outside of the matrix are zeros
    assert not out[:60, 104:].any()
    assert (out[60:] == 7).all()
    assert copied(64, skip=True).isnan().all()
    with pytest.raises(RuntimeError, match="no barrier will complete"):
        copied(64, extra=16)
    with pytest.raises(IndexError, match="of 4096"):
        copy_kernel[(2,)](box, torch.zeros(4096), 64, SKIP=False, EXTRA=0)

    square = torch.randn(64, 64).bfloat16()
    for early in (False, True):
        out = torch.zeros(64, 64)
        square_kernel[(1,)](descriptor(square, [64, 64]), out, EARLY=early)
        assert torch.allclose(out, square.float() @ square.float(), atol=1e-4) != early


def test_it_finds_what_is_wrong() -> None:
    run_gluon(find_what_is_wrong)


def test_ptx() -> None:
    """Against Python's integers: which bits a turn and a table of three inputs leave, and what a warp agrees on."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randint(-(2**31), 2**31 - 1, (2, 64, 1), generator=generator, dtype=torch.int64).int()
    [turned] = run_ptx("{ shf.l.wrap.b32 $0, $1, $1, 9; }", [a], (torch.int32,), 1)
    [mixed] = run_ptx("{ lop3.b32 $0, $1, $2, 0xF0F0F0F0, 0xE4; }", [a, b], (torch.int32,), 1)
    for x, y, got in zip(
        a.flatten().tolist(), b.flatten().tolist(), torch.stack((turned, mixed)).unbind(1), strict=True
    ):
        word = x & 0xFFFFFFFF
        assert int(got[0]) & 0xFFFFFFFF == (word << 9 | word >> 23) & 0xFFFFFFFF
        assert int(got[1]) & 0xFFFFFFFF == (x & 0xF0F0F0F0 | y & 0x0F0F0F0F)
    pairs = torch.arange(64, dtype=torch.int32)[:, None] % 5
    code = "{ match.any.sync.b32 $0, $2, 0xFFFFFFFF; popc.b32 $1, $0; }"
    members, count = run_ptx(code, [pairs], (torch.int32, torch.int32), 1)
    for lane in range(32):
        same = [other for other in range(32) if other % 5 == lane % 5]
        assert int(members[lane]) & 0xFFFFFFFF == sum(1 << other for other in same)
        assert int(count[lane]) == len(same)
    assert int(members[32]) & 0xFFFFFFFF == sum(1 << lane for lane in range(32) if (32 + lane) % 5 == 2)
    with pytest.raises(NotImplementedError, match="ex2"):
        run_ptx("{ ex2.approx.f32 $0, $1; }", [a], (torch.int32,), 1)
