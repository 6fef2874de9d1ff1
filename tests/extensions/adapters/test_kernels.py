"""The kernels of adapters: interpreted on a CPU against the definition, compiled ahead, and on a GPU."""

import pytest
import torch
from torch import Tensor

from oscine.extensions.adapters.kernels import (
    TABLE_ROWS,
    Kernels,
    _expand_kernel,
    _shrink_kernel,
    _table_kernel,
    block_of,
)
from oscine.extensions.adapters.products import Norm, Reference, Rows
from oscine.ops.interface import ExpertTokens
from oscine.ops.target import Target
from tests.ops.bound import target_of
from tests.ops.chips import CHIPS
from tests.ops.compile_ahead import compile_ahead, run_interpreted

CPU = torch.device("cpu")
# tokens, experts per token (0: a matrix of all tokens), experts, columns, rows, rank; each has its reason
CASES = {
    "one token": (1, 0, 1, 64, 48, 16),
    "odd columns, a tile of rows that is not full": (5, 0, 1, 136, 200, 16),
    "rank 64": (3, 0, 1, 96, 64, 64),
    "more rows of one adapter than a tile": (40, 0, 1, 64, 64, 32),
    "two tiles of each adapter, and many without": (100, 0, 1, 264, 64, 16),
    "many columns of few rows": (20, 0, 1, 1096, 64, 16),
    "few pairs": (3, 4, 8, 96, 72, 16),
    "pairs": (9, 4, 8, 96, 72, 16),
    "more pairs than keys": (60, 4, 5, 72, 40, 16),
    "sorted pairs": (TABLE_ROWS // 4 + 9, 4, 3, 32, 40, 16),
    "sorted tokens": (TABLE_ROWS + 5, 0, 1, 32, 32, 16),
}


def random(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(device, dtype)


def memory(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Factors of three slots, with others between them."""
    padded = torch.full((3, torch.Size(shape).numel() + 64), torch.nan, device=device, dtype=dtype)
    padded[:, :-64].copy_(random(3, *shape, seed=seed, device=device, dtype=torch.float32).flatten(1))
    return padded[:, :-64].unflatten(1, shape)


def keys(tokens: int, per_token: int, experts: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The slots of tokens, and their experts."""
    generator = torch.Generator().manual_seed(tokens)
    slots = torch.randint(-1, 3, (tokens,), generator=generator).int().to(device)
    if not per_token:
        return slots, None
    chosen = torch.stack([torch.randperm(experts, generator=generator) for _ in range(tokens)])
    return slots, chosen.repeat(1, per_token)[:, :per_token].to(device, torch.int32).contiguous()


def check(name: str, device: torch.device, dtype: torch.dtype, bound: float) -> None:
    tokens, per_token, experts, columns, num_rows, rank = CASES[name]
    options = {"device": device, "dtype": dtype}
    kernels, reference = Kernels(target_of(device)), Reference()
    rows = kernels.rows(
        keys(tokens, per_token, experts, device)[0], 3, keys(tokens, per_token, experts, device)[1], experts
    )
    given = rows.keys_P
    of = (experts,) if per_token else ()
    into = memory(*of, rank, columns, seed=1, **options)  # type: ignore[arg-type]
    out_of = memory(*of, num_rows, rank, seed=2, **options)  # type: ignore[arg-type]
    x = random(tokens, columns, seed=3, device=device, dtype=dtype)
    y = kernels.shrink(x, rows, into, 1)
    expected_y = reference.shrink(x.float(), rows, into, 1)
    _close(y.sum(0)[given >= 0], expected_y[given >= 0], bound)
    before = random(len(given), 2, num_rows, seed=4, device=device, dtype=torch.float32)
    weights = torch.rand(len(given), device=device)
    for adds, given_weights in ((True, None), (False, None), (True, weights)):
        out, expected = (before.clone() if adds else torch.full_like(before, torch.nan) for _ in range(2))
        expected[:, 1] = out[:, 1] = 7
        kernels.expand(y, rows, out_of, out, adds=adds, weights_P=given_weights)
        reference.expand(expected_y, rows, out_of, expected, adds=adds, weights_P=given_weights)
        _close(out, expected, bound)


def check_segments(device: torch.device, dtype: torch.dtype, bound: float) -> None:
    """Queries, keys and values, of tokens that are still to be divided by their norm."""
    rows_of, rank, columns, tokens = (192, 64, 64), 16, 96, 6
    kernels, reference = Kernels(target_of(device)), Reference()
    into = memory(3 * rank, columns, seed=1, device=device, dtype=dtype)
    out_of = memory(sum(rows_of), rank, seed=2, device=device, dtype=dtype)
    x = random(tokens, columns, seed=3, device=device, dtype=dtype)
    squares = torch.rand(tokens, 3, device=device) + 0.5
    norm = Norm(squares, 1e-3, columns)
    rows = kernels.rows(keys(tokens, 0, 1, device)[0], 3)
    ends = (192, 256, 320)
    out, expected = (torch.full((tokens, 320), torch.nan, device=device, dtype=dtype) for _ in range(2))
    kernels.expand(kernels.shrink(x, rows, into, 3), rows, out_of, out, adds=False, ends=ends, norm=norm)
    y = reference.shrink(x, rows, into, 3)
    reference.expand(y, rows, out_of, expected, adds=False, ends=ends, norm=norm)
    _close(out, expected, bound)


def check_table(device: torch.device) -> None:
    """Each row is in one block of its key; those without an adapter too."""
    kernels = Kernels(target_of(device))
    for given in ([-1] * 20, [2] * 33, [2, -1, 0] * 11, [0, 1, 2, 2] * 16 + [-1] * 36, [1] * 2100 + [-1, 0] * 7):
        for slots in (3, 40):  # more blocks than rows of some of these, and fewer
            rows = kernels.rows(torch.tensor(given, dtype=torch.int32, device=device), slots)
            assert sorted(_blocks_of(rows)) == sorted((key, row) for row, key in enumerate(given))
    slots_T, ids_TK = keys(30, 4, 7, device)
    rows = kernels.rows(slots_T, 3, ids_TK, 7)
    assert sorted(_blocks_of(rows)) == sorted((key, row) for row, key in enumerate(rows.keys_P.tolist()))


def _blocks_of(rows: Rows) -> list[tuple[int, int]]:
    """(key, row) of all rows that blocks have."""
    assert rows.order_P is not None
    assert rows.blocks_B3 is not None
    found = []
    for key, start, number in rows.blocks_B3.tolist():
        assert number <= 16
        found += [(key, row) for row in rows.order_P[start : start + number].tolist()]
    return found


def check_second(device: torch.device, dtype: torch.dtype, bound: float, tokens: int, *, planes: bool) -> None:
    """Activations of experts, in an order of their own, and as planes of FP8."""
    experts, rank, columns, factor = 4, 16, 64, 8.0
    kernels, reference = Kernels(target_of(device)), Reference()
    slots_T, ids_TK = keys(tokens, 2, experts, device)
    rows = kernels.rows(slots_T, 3, ids_TK, experts)
    given = rows.keys_P
    into = memory(experts, rank, columns, seed=1, device=device, dtype=dtype)
    h = random(len(given), columns, seed=5, device=device, dtype=torch.float32) * factor
    if planes:
        high = h.to(torch.float8_e4m3fn)
        low = ((h - high.float()) * 16).to(torch.float8_e4m3fn)
        h = torch.stack((high, low), 1)
    order = torch.randperm(len(given), generator=torch.Generator().manual_seed(1)).int().to(device)
    hidden = ExpertTokens(h, factor, order, is_ready=True)
    expected = reference.shrink(h, rows, into, 1, hidden)
    for places in (None, order.argsort().int()):
        got = kernels.shrink(h, rows, into, 1, hidden._replace(places_P=places)).sum(0)
        _close(got[given >= 0], expected[given >= 0], bound)


def _close(got: Tensor, expected: Tensor, bound: float) -> None:
    assert got.isfinite().all()
    assert (got.double() - expected.double()).norm() <= bound * expected.double().norm()


def in_interpreter() -> None:
    for name in CASES:
        check(name, CPU, torch.float32, 1e-5)
    check_segments(CPU, torch.float32, 1e-5)
    check_table(CPU)
    for tokens in (7, 20, TABLE_ROWS // 2 + 4):
        check_second(CPU, torch.float32, 1e-5, tokens, planes=False)
    check_second(CPU, torch.float32, 1e-5, 7, planes=True)


@pytest.mark.slow
def test_kernels_compute_the_definition() -> None:
    run_interpreted(in_interpreter)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernels_on_a_gpu(name: str) -> None:
    check(name, torch.device("cuda"), torch.bfloat16, 0.01)


@pytest.mark.gpu
def test_segments_and_activations_on_a_gpu() -> None:
    cuda = torch.device("cuda")
    check_segments(cuda, torch.bfloat16, 0.01)
    check_table(cuda)
    for tokens in (7, 20, TABLE_ROWS // 2 + 4):
        check_second(cuda, torch.bfloat16, 0.01, tokens, planes=False)
    if Target.of(cuda).capability >= (8, 9):
        check_second(cuda, torch.bfloat16, 0.01, 7, planes=True)


@pytest.mark.compiles
@pytest.mark.parametrize("arch", [arch if arch == 90 else pytest.param(arch, marks=pytest.mark.slow) for arch in CHIPS])
@pytest.mark.parametrize("found", ["few", "table", "sorted"])
def test_kernels_compile(arch: int, found: str) -> None:
    options = {"PDL": arch >= 90, "num_warps": 4, **({"launch_pdl": True} if arch >= 90 else {})}
    selection = {"BLOCK_P": 16}
    common = {"keys": "*i32", "count": "i32", "slot_stride": "i32"}
    absent: dict[str, None] = {}
    for name, given in (("order", found != "few"), ("blocks", found == "table"), ("ids", found != "table")):
        common |= {name: "*i32"} if given else {}
        absent |= {} if given else {name: None}
    shrink = {"x": "*bf16", "into": "*bf16", "y": "*fp32", "scale": "fp32", **common}
    experts = {"E": 128, "K": 4, "PER_TOKEN": 4} if found != "table" else {"E": 1, "K": 1, "PER_TOKEN": 1}
    waits = {"CHOSEN": found == "few", "READY": found == "sorted"}
    constants = {**experts, **waits, "COLUMNS": 2880, "RANK": 64, "SEGMENTS": 1, "PLANES": False}
    pairs = {"pairs": None, "places": None}
    launch = {name: options.pop(name) for name in ("num_warps", "launch_pdl") if name in options}
    for steps, block in ((45, block_of(64)), *(((1, 128),) if found != "sorted" else ())):
        cut = {"STEPS": steps, "BLOCK_C": block}
        compile_ahead(
            _shrink_kernel,
            shrink,
            {**constants, **pairs, **absent, **selection, **cut, **options},
            arch=arch,
            **launch,
            **({"maxnreg": 128} if steps == 1 else {}),
        )
    expand = {"y": "*fp32", "out_of": "*bf16", "out": "*bf16", "out_stride": "i32", "eps": "fp32", **common}
    expand |= {"first": "i32", "second": "i32"}
    constants = {**experts, "ROWS": 5760, "RANK": 64, "SEGMENTS": 1, "SPLITS": 2, "SQUARES": 0, "WIDTH": 1}
    del constants["PER_TOKEN"]
    others = {"weights": None, "squares": None, "ADDS": False}
    compile_ahead(
        _expand_kernel,
        expand,
        {**constants, **others, **absent, **selection, "BLOCK_N": block_of(64), **options},
        arch=arch,
        **launch,
    )


@pytest.mark.compiles
def test_the_table_compiles() -> None:
    signature = {"keys": "*i32", "ids": "*i32", "order": "*i32", "blocks": "*i32", "count": "i32", "num_keys": "i32"}
    constants = {"E": 32, "K": 4, "DENSE": True, "STEP": 1024, "BLOCK_B": 128, "BLOCK_P": 16, "PDL": True}
    assert compile_ahead(_table_kernel, signature, constants, num_warps=4, launch_pdl=True).spills == 0
