"""A dynamic tile scheduler: programs that stay on their processor take tiles one by one, from a counter in memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# The first thread of a warp takes the next tile, all are told.
NEXT_TILE = gl.constexpr("""{
    .reg .pred first;
    .reg .b32 lane;
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    mov.b32 $0, 0;
    @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
    redux.sync.add.u32 $0, $0, 0xFFFFFFFF;
}""")


@gluon.jit
def next_tile(tile_counters_ptr):
    """The next free tile; the first tile of each program is fixed."""
    taken = gl.inline_asm_elementwise(
        NEXT_TILE, "=&r,l", [tile_counters_ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )
    return gl.num_programs(0) + taken
