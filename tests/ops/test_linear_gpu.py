"""The dense projections: compiled ahead of a GPU, interpreted on a CPU, and on a GPU.

Float32 torch is the oracle; a kernel may have at most twice the error of plain torch in bfloat16.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from oscine.ops.interface import AddedProducts, QkvProjection
from oscine.ops.linear import hopper, reference
from oscine.ops.linear import triton as portable
from oscine.ops.linear.hopper_bf12 import Bf12Matrix, pack
from oscine.ops.linear.hopper_stream import CHUNK, Tile
from oscine.ops.qkv import hopper as qkv_hopper
from oscine.ops.qkv import reference as qkv_reference
from oscine.ops.qkv import triton as qkv_portable
from oscine.ops.rope.reference import rope_and_write as reference_rope
from oscine.ops.rope.triton import rope_and_write
from tests.ops.bound import bound
from tests.ops.compile_ahead import Compiled, box_type, compile_ahead, marked, run_interpreted, word_box_type
from tests.ops.gluon_interpreter import run_gluon
from tests.ops.low_rank import adapters

THREE_PER_SM = 168  # registers per thread of programs with 128 threads


def assert_streams(kernel: Compiled) -> None:
    assert kernel.spills == 0
    assert "HGMMA" in kernel.sass
    assert "UTMALDG" in kernel.sass
    assert "griddepcontrol.launch_dependents" in kernel.ptx
    assert "griddepcontrol.wait" in kernel.ptx


def ends(tiles: Sequence[Tile], *more: Any) -> list[Any]:
    """Parameters. The tiles between the first and the last are slow."""
    return marked([(tile, *more) for tile in tiles], newest=[(tiles[-1], *more)], oldest=[(tiles[0], *more)])


@pytest.mark.compiles
@pytest.mark.parametrize("tile", ends(qkv_hopper.TILES) + ends(qkv_hopper.FEW_HEADS_TILES), ids=str)
def test_qkv_compiles_for_hopper(tile: Tile) -> None:
    kernel = compile_qkv(tile)
    assert_streams(kernel)
    assert kernel.registers <= 128


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("tile", "rank"),
    marked(
        product(qkv_hopper.TILES[:2], (16, 32)), newest=[(qkv_hopper.TILES[1], 32)], oldest=[(qkv_hopper.TILES[0], 16)]
    ),
    ids=str,
)
def test_qkv_with_adapters_compiles_for_hopper(tile: Tile, rank: int) -> None:
    assert_streams(compile_qkv(tile, rank=rank))
    assert_streams(compile_qkv(replace(tile, stages=3), rank=rank, narrow=True))


@pytest.mark.compiles
def test_qkv_of_12_bits_with_adapters_compiles_for_hopper() -> None:
    """With one or two tokens its 320 programs run at once on 132 SMs."""
    kernel = compile_qkv(qkv_hopper.beside_adapters(qkv_hopper.BF12_TILES[0]), rank=16, narrow=True)
    assert_streams(kernel)
    assert kernel.registers <= THREE_PER_SM


@pytest.mark.compiles
@pytest.mark.parametrize("tile", ends(qkv_hopper.BF12_TILES), ids=str)
def test_qkv_of_12_bits_compiles_for_hopper(tile: Tile) -> None:
    assert_streams(compile_qkv(tile, narrow=True))


def words_or_weights(
    narrow: bool, words: tuple[int, ...], weights: tuple[int, ...]
) -> tuple[dict[str, str], dict[str, None]]:
    """Types of the two arguments that differ, and the constant that one of them is."""
    if narrow:
        return {"weight": word_box_type(*words), "scale_ptr": "*fp32"}, {}
    return {"weight": box_type(*weights)}, {"scale_ptr": None}


def compile_qkv(
    tile: Tile, pages: str = "*bf16", *, narrow: bool = False, exponents: str | None = None, rank: int = 0
) -> Compiled:
    weight, constant = words_or_weights(
        narrow, (1, tile.parts, 4 // tile.parts, 2 * tile.chunks * CHUNK), (tile.parts, 2, 32 // tile.parts, CHUNK)
    )
    exponents_type = {} if exponents is None else {"exponents_ptr": exponents}
    adapters_types, no_adapters = low_rank_arguments(rank)
    return compile_ahead(
        qkv_hopper.qkv_kernel,
        {
            **weight,
            **exponents_type,
            **adapters_types,
            "tokens": box_type(tile.parts, tile.max_tokens, CHUNK),
            "squares_ptr": "*fp32",
            "bias_ptr": "*bf16",
            "cos_sin_ptr": "*fp32",
            "positions_ptr": "*i64",
            "slots_ptr": "*i64",
            "q_ptr": "*bf16",
            "kv_ptr": pages,
            "num_tokens": "i32",
            "eps": "fp32",
            "kv_page_stride": "i32",
            "kv_kind_stride": "i32",
            "kv_head_stride": "i32",
            "kv_slot_stride": "i32",
            "adapter_stride": "i32",
        },
        {
            **constant,
            **({} if exponents_type else {"exponents_ptr": None}),
            **no_adapters,
            "added_ptr": None,
            "QUERY_HEADS": 64,
            "KV_HEADS": 8,
            "PAGE": 64,
            "HIDDEN": 2880,
            "SQUARES": 6,
            "PARTS": tile.parts,
            **tile.projection_constants(2880 // tile.parts),
        },
        divisible=("kv_page_stride", "kv_kind_stride", "kv_head_stride", "kv_slot_stride"),
        num_warps=4,
        launch_pdl=True,
    )


def low_rank_arguments(rank: int) -> tuple[dict[str, str], dict[str, int | None]]:
    """Types of pointers and constants that kernels have for adapters of this rank."""
    types = {"keys_ptr": "*i32", "low_ptr": "*fp32", "second_ptr": "*bf16"}
    constants = {"RANK": rank, "LOW_SPLITS": 8 if rank else 0}
    return (types, {**constants}) if rank else ({}, {**constants, **dict.fromkeys(types)})


@pytest.mark.compiles
@pytest.mark.parametrize("narrow", marked((False, True), newest=[True], oldest=[False]))
def test_out_proj_with_adapters_compiles_for_hopper(narrow: bool) -> None:
    tile = (hopper.OUT_PROJ_BF12_TILES if narrow else hopper.OUT_PROJ_TILES)[0]
    assert_streams(compile_stream(tile, 4096, narrow=narrow, rank=16))
    alone = compile_stream(tile, 4096, narrow=narrow, rank=16, alone=True)
    assert_streams(alone)
    assert alone.registers <= THREE_PER_SM


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("tile", "columns", "narrow"),
    ends(hopper.OUT_PROJ_TILES, 4096, False)
    + ends(hopper.OUT_PROJ_BF12_TILES, 4096, True)
    + ends(hopper.LM_HEAD_TILES, 2880, False),
    ids=str,
)
def test_out_proj_and_head_compile_for_hopper(tile: Tile, columns: int, narrow: bool) -> None:
    kernel = compile_stream(tile, columns, narrow=narrow)
    assert_streams(kernel)
    assert kernel.registers <= (200 if narrow else 128)


def compile_stream(tile: Tile, columns: int, *, narrow: bool, rank: int = 0, alone: bool = False) -> Compiled:
    """alone: the kernel multiplies with both factors of the only token."""
    adapters_types, no_adapters = low_rank_arguments(rank)
    if alone:
        del adapters_types["low_ptr"]
        adapters_types |= {"first_ptr": "*bf16", "x_ptr": "*bf16"}
        no_adapters |= {"low_ptr": None, "LOW_SPLITS": 0}
    else:
        no_adapters |= {"first_ptr": None, "x_ptr": None}
    weight, constant = words_or_weights(narrow, (1, 1, 4, 2 * tile.chunks * CHUNK), (1, 1, tile.rows, CHUNK))
    return compile_ahead(
        hopper.stream_kernel,
        {
            **weight,
            **adapters_types,
            "tokens": box_type(1, tile.max_tokens, CHUNK),
            "bias_ptr": "*bf16",
            "out_ptr": "*fp32",
            "num_rows": "i32",
            "num_tokens": "i32",
            "num_columns": "i32",
            "slot_stride": "i32",
            "first_stride": "i32",
        },
        {
            **constant,
            **no_adapters,
            "ROWS": tile.rows,
            "SPLITS": tile.parts + (rank > 0 and not alone),
            **tile.projection_constants(columns // tile.parts),
            "HAS_BIAS": columns == 4096,
        },
        divisible=("num_rows", "num_columns", "slot_stride", "first_stride"),
        num_warps=tile.warps,
        launch_pdl=True,
    )


def as_it_is(weight: Tensor) -> Any:
    return weight


@dataclass(frozen=True)
class Projection:
    """One layer's inputs. kv_pages is one of three layers' pages, so it is strided; NaN before the op."""

    x_TJH: Tensor  # partial sums
    norm_H: Tensor
    residual_TH: Tensor
    weight_FH: Tensor
    bias_F: Tensor
    cos_sin: Tensor
    positions_T: Tensor
    pool: Tensor
    slots_T: Tensor

    def run(
        self,
        op: Callable[..., tuple[Tensor, Tensor]],
        dtype: torch.dtype,
        prepare: Callable[[Tensor], Any] = as_it_is,
        added: AddedProducts | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(queries, x + residual, pool), all float32. prepare: what the op is given as the weight."""
        pool = self.pool.to(dtype)
        norm, residual, weight, bias = (
            t.to(dtype) for t in (self.norm_H, self.residual_TH, self.weight_FH, self.bias_F)
        )
        place = self.cos_sin, self.positions_T, pool[:, 1], self.slots_T
        queries, total = op(self.x_TJH, norm, 1e-5, residual, QkvProjection(prepare(weight), bias, *place, None, added))
        return queries.float(), total.float(), pool.float()


def projection(
    num_tokens: int,
    device: str,
    *,
    hidden: int = 2880,
    query_heads: int = 64,
    kv_heads: int = 8,
    head_dim: int = 64,
    page: int = 64,
) -> Projection:
    """The first token goes to the last slot of the last page, the second to the very first slot; others anywhere."""
    generator = torch.Generator().manual_seed(num_tokens)
    rows = (query_heads + 2 * kv_heads) * head_dim
    pages = num_tokens // page + 3
    slots = torch.randperm(pages * page - 2, generator=generator)[:num_tokens] + 1
    slots[:1], slots[1:2] = pages * page - 1, 0

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    x_TJH, residual_TH = normal(num_tokens, 3, hidden).float(), normal(num_tokens, hidden)
    for inputs in (x_TJH, residual_TH):
        inputs[:1] /= 512  # so small that the norm's epsilon counts
    return Projection(
        x_TJH=x_TJH,
        norm_H=normal(hidden),
        residual_TH=residual_TH,
        weight_FH=normal(rows, hidden) / hidden**0.5,
        bias_F=normal(rows),
        cos_sin=torch.rand(500, head_dim, generator=generator).to(device) * 2 - 1,
        positions_T=torch.randint(0, 500, (num_tokens,), generator=generator).to(device),
        pool=torch.full((pages, 3, 2, kv_heads, page, head_dim), torch.nan, device=device),
        slots_T=slots.to(device),
    )


def relative_error(got: Tensor, expected: Tensor) -> float:
    """0 for nothing at all; NaN where got has one."""
    return float((got.float() - expected).norm() / expected.norm()) if expected.numel() else 0.0


def rope_like_reference() -> None:
    for num_tokens, query_heads, kv_heads, head_dim, page in (
        (1, 64, 8, 64, 64),  # one decode
        (37, 8, 2, 64, 64),  # the embedded model, odd count
        (70, 8, 8, 64, 16),  # several tokens a program, the last one not full
        (5, 3, 3, 16, 8),  # no common power of two among the heads
    ):
        case = projection(
            num_tokens, "cpu", hidden=8, query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim, page=page
        )
        generator = torch.Generator().manual_seed(0)
        qkv = torch.randn(num_tokens, (query_heads + 2 * kv_heads) * head_dim, generator=generator)
        for dtype in (torch.float32, torch.bfloat16):
            results = []
            for op in (bound(rope_and_write), reference_rope):
                pool = case.pool.to(dtype)
                queries = op(qkv.to(dtype), case.cos_sin, case.positions_T, pool[:, 1], case.slots_T)
                results.append((queries.float(), pool.float()))
            (queries, pool), (expected_queries, expected_pool) = results
            check_left_rotation(case, qkv.to(dtype), pool)
            # the interpreter cuts float32 off where a GPU rounds it to bfloat16
            tolerance = {"rtol": 2**-7, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
            torch.testing.assert_close(queries, expected_queries, **tolerance)
            torch.testing.assert_close(pool, expected_pool, equal_nan=True, **tolerance)


def check_left_rotation(case: Projection, qkv: Tensor, expected_pool: Tensor) -> None:
    """Keys and values are written as ever, and the queries are those of the projection."""
    pool = case.pool.to(qkv.dtype)
    place = case.cos_sin, case.positions_T, pool[:, 1], case.slots_T
    left = bound(rope_and_write)(qkv, *place, leave_rotation=True)
    _, heads, head_dim = left.q_TQD.shape
    assert torch.equal(left.q_TQD.flatten(1), qkv[:, : heads * head_dim])
    assert (left.cos_sin, left.positions_T) == (case.cos_sin, case.positions_T)
    torch.testing.assert_close(pool.float(), expected_pool, equal_nan=True, rtol=0, atol=0)


def test_rope_like_reference() -> None:
    run_interpreted(rope_like_reference)


def test_heads_must_be_a_power_of_two() -> None:
    case = projection(2, "cpu", hidden=8, head_dim=48)
    with pytest.raises(ValueError, match="head_dim 48"):
        bound(rope_and_write)(torch.zeros(2, 80 * 48), case.cos_sin, case.positions_T, case.pool[:, 1], case.slots_T)


GPU_BACKENDS = [
    pytest.param("triton", marks=pytest.mark.gpu),
    pytest.param("hopper", marks=pytest.mark.hopper),
]
# Each tile full and not full, the first count beyond tiles, and a long chunk of a prompt; and some of each.
TOKENS = (1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 65, 777)
SOME_TOKENS = (1, 5, 33, 65)
NORM_QKV = {"triton": bound(qkv_portable.norm_qkv), "hopper": bound(qkv_hopper.norm_qkv)}
OUT_PROJ = {"triton": reference.out_proj, "hopper": hopper.out_proj}
LM_HEAD = {"triton": portable.lm_head, "hopper": hopper.lm_head}


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize(
    ("widths", "num_tokens"),
    [
        *(({}, n) for n in TOKENS),  # as published
        *(({"query_heads": 32, "kv_heads": 4}, n) for n in TOKENS),  # one of two ranks
        *(({"hidden": 256, "query_heads": 8, "kv_heads": 2}, n) for n in SOME_TOKENS),  # the embedded model
        # columns that fill no chunk and cannot be cut in parts, small pages
        *(({"hidden": 104, "query_heads": 3, "kv_heads": 1, "page": 16}, n) for n in SOME_TOKENS),
        # not the streaming kernel's heads
        *(({"hidden": 64, "query_heads": 4, "kv_heads": 2, "head_dim": 32}, n) for n in SOME_TOKENS),
    ],
    ids=str,
)
def test_norm_qkv_on_gpu(backend: str, widths: dict[str, int], num_tokens: int) -> None:
    check_norm_qkv(NORM_QKV[backend], projection(num_tokens, "cuda", **widths))


@pytest.mark.hopper
@pytest.mark.parametrize(
    "heads", [{}, {"query_heads": 32, "kv_heads": 4}, {"hidden": 256, "query_heads": 8, "kv_heads": 2}]
)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_norm_qkv_of_12_bits_on_gpu(heads: dict[str, int], num_tokens: int) -> None:
    check_norm_qkv(NORM_QKV["hopper"], projection(num_tokens, "cuda", **heads), packed)


def packed(weight: Tensor) -> Bf12Matrix:
    matrix = pack(weight)
    assert isinstance(matrix, Bf12Matrix)
    return matrix


def check_norm_qkv(
    op: Callable[..., tuple[Tensor, Tensor]],
    case: Projection,
    prepare: Callable[[Tensor], Any] = as_it_is,
    rank: int = 0,
) -> None:
    """rank: of adapters that add to the products; 0: there are none."""
    added = None
    if rank:
        _, hidden = case.residual_TH.shape
        rows, kv_rows = len(case.bias_F), case.pool.shape[3] * case.pool.shape[5]
        ends = rows - 2 * kv_rows, rows - kv_rows, rows
        added = adapters(len(case.residual_TH), hidden, ends, str(case.bias_F.device), rank)
    queries, total, pool = case.run(op, torch.bfloat16, prepare, added)
    torch_queries, torch_total, torch_pool = case.run(qkv_reference.norm_qkv, torch.bfloat16, added=added)
    expected_queries, expected_total, expected_pool = case.run(qkv_reference.norm_qkv, torch.float32, added=added)
    written = ~expected_pool.isnan()
    assert torch.equal(~pool.isnan(), written)
    # The interpreter cuts off what a GPU rounds.
    assert relative_error(total, expected_total) <= 2.1 * relative_error(torch_total, expected_total)
    assert relative_error(queries, expected_queries) <= 2 * relative_error(torch_queries, expected_queries)
    allowed = 2 * relative_error(torch_pool[written], expected_pool[written])
    assert relative_error(pool[written], expected_pool[written]) <= allowed


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize(
    ("rows", "columns", "num_tokens"),
    [
        *((2880, 4096, n) for n in (0, *TOKENS)),  # as published
        *((256, 512, n) for n in SOME_TOKENS),  # the embedded model
        *((72, 200, n) for n in SOME_TOKENS),  # columns that fill no chunk, rows that fill no tile
        *((33, 36, n) for n in SOME_TOKENS),  # rows of no whole 16 bytes
    ],
)
def test_out_proj_and_head_on_gpu(backend: str, rows: int, columns: int, num_tokens: int) -> None:
    check_out_proj_and_head(backend, rows, columns, num_tokens, "cuda")


def interpret_projections() -> None:
    for num_tokens, heads in ((1, 2), (3, 2), (9, 2), (33, 2), (3, qkv_hopper.FEW_HEADS)):  # of both tables of tiles
        check_norm_qkv(
            bound(qkv_hopper.norm_qkv),
            projection(num_tokens, "cpu", hidden=576, query_heads=heads, kv_heads=1, page=16),
        )
        check_out_proj_and_head("hopper", 200, 1000, num_tokens, "cpu")
    for num_tokens, rank in ((1, 16), (7, 16), (3, 32), (9, 16), (3, 64)):  # inside the kernels, and beside them
        case = projection(num_tokens, "cpu", hidden=192, query_heads=2, kv_heads=1, page=16)
        check_norm_qkv(bound(qkv_hopper.norm_qkv), case, rank=rank)
        check_adapted_out_proj(200, 192, num_tokens, rank, "cpu")
    check_adapted_out_proj(200, 1000, 1, 16, "cpu")
    check_adapted_out_proj(72, 192, 1, 16, "cpu", is_adapted=False)


def interpret_projections_of_12_bits() -> None:
    # parts of whole chunks, and parts of three and a half atoms' columns
    for num_tokens, hidden in ((1, 1024), (1, 448), (3, 448), (9, 448), (33, 192)):
        case = projection(num_tokens, "cpu", hidden=hidden, query_heads=2, kv_heads=1, page=16)
        check_norm_qkv(bound(qkv_hopper.norm_qkv), case, packed)
        check_out_proj_of_12_bits(192, 1000 // 16 * 16, num_tokens, "cpu")
    for columns in (992, 192):
        check_adapted_out_proj(192, columns, 1, 16, "cpu", packed)


@pytest.mark.hopper
@pytest.mark.parametrize(("rows", "columns"), [(2880, 4096), (256, 512), (64, 208)])
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_out_proj_of_12_bits_on_gpu(rows: int, columns: int, num_tokens: int) -> None:
    check_out_proj_of_12_bits(rows, columns, num_tokens, "cuda")


@pytest.mark.hopper
@pytest.mark.parametrize("rank", [16, 32, 64])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 9, 64, 65])
def test_projections_with_adapters_on_gpu(num_tokens: int, rank: int) -> None:
    for prepare in (as_it_is, packed):
        check_norm_qkv(NORM_QKV["hopper"], projection(num_tokens, "cuda"), prepare, rank)
        check_adapted_out_proj(2880, 4096, num_tokens, rank, "cuda", prepare)


def check_adapted_out_proj(
    rows: int,
    columns: int,
    num_tokens: int,
    rank: int,
    device: str,
    prepare: Callable[[Tensor], Any] = as_it_is,
    *,
    is_adapted: bool = True,
) -> None:
    """The partial sums that the kernel writes, and one more unless there is only one token."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, columns, generator=generator).bfloat16().to(device)
    weight = (torch.randn(rows, columns, generator=generator) / columns**0.5).bfloat16().to(device)
    bias, added = (
        torch.randn(rows, generator=generator).bfloat16().to(device),
        adapters(num_tokens, columns, (rows,), device, rank),
    )
    if not is_adapted:
        added.keys_T.fill_(-1)
    expected = reference.out_proj(x.double(), weight.double(), bias.double(), added)
    found = hopper.out_proj(x, prepare(weight), bias, added)
    if found.dim() == 3:
        assert relative_error(found.sum(1), expected) < 2e-5
    else:
        assert relative_error(found, expected) < 0.01


def check_out_proj_of_12_bits(rows: int, columns: int, num_tokens: int, device: str) -> None:
    """The error of float32 sums over the values as they are, where the kernel makes them."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, columns, generator=generator).bfloat16().to(device)
    weight = (torch.randn(rows, columns, generator=generator) / columns**0.5).bfloat16().to(device)
    weight[3] = 0
    bias = torch.randn(rows, generator=generator).bfloat16().to(device)
    expected = reference.out_proj(x.double(), weight.double(), bias.double())
    total = hopper.out_proj(x, packed(weight), bias)
    if total.dim() == 3:
        assert relative_error(total.sum(1), expected) < 2e-6
    else:
        assert relative_error(total, expected) < 0.01


def test_interpreted_projections_of_12_bits() -> None:
    run_gluon(interpret_projections_of_12_bits)


def test_interpreted_projections() -> None:
    run_gluon(interpret_projections)


def check_out_proj_and_head(backend: str, rows: int, columns: int, num_tokens: int, device: str) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, columns, generator=generator).bfloat16().to(device)
    weight = (torch.randn(rows, columns, generator=generator) / columns**0.5).bfloat16().to(device)
    bias = torch.randn(rows, generator=generator).bfloat16().to(device)
    expected = reference.out_proj(x.float(), weight.float(), bias.float())
    parts = OUT_PROJ[backend](x, weight, bias)
    total = parts.float().sum(1) if parts.dim() == 3 else parts
    allowed = 2 * relative_error(reference.out_proj(x, weight, bias), expected)
    assert relative_error(total, expected) <= allowed
    logits = LM_HEAD[backend](x, weight)
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    expected = reference.lm_head(x.float(), weight.float())
    assert logits.shape == expected.shape
    assert relative_error(logits, expected) <= 2 * relative_error(reference.lm_head(x, weight), expected)


@pytest.mark.hopper
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_a_graph_replays_what_the_kernels_do(num_tokens: int) -> None:
    """Dependent launches within a graph: the second projection reads what the first just wrote, three times over."""
    case = projection(num_tokens, "cuda")
    generator = torch.Generator().manual_seed(0)
    out_weight = (torch.randn(2880, 4096, generator=generator) / 64).bfloat16().cuda()
    pool, x = case.pool.bfloat16(), case.residual_TH

    def two_layers(norm_qkv: Callable[..., tuple[Tensor, Tensor]], out_proj: Callable[..., Tensor]) -> Tensor:
        y, residual = x, None
        place = case.cos_sin, case.positions_T, pool[:, 1], case.slots_T
        weights = QkvProjection(case.weight_FH, case.bias_F, *place)
        for _ in range(2):
            queries, residual = norm_qkv(y, case.norm_H, 1e-5, residual, weights)
            y = out_proj(queries.flatten(1), out_weight, case.bias_F[:2880])
        return (y.sum(1) if y.dim() == 3 else y) + residual

    two_layers(bound(qkv_hopper.norm_qkv), hopper.out_proj)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = two_layers(bound(qkv_hopper.norm_qkv), hopper.out_proj)
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        pool.fill_(torch.nan)
        result.fill_(torch.nan)
        graph.replay()
        written = pool.clone()
        expected = two_layers(bound(qkv_portable.norm_qkv), reference.out_proj)
        assert relative_error(result, expected.float()) < 0.02
        assert torch.equal(written.isnan(), pool.isnan())
