"""The kernels of adapters: interpreted on a CPU against the definition, compiled ahead, and on a GPU."""

import pytest
import torch
from torch import Tensor

from oscine.extensions.adapters.entries import LEAST_ROWS, _entries_kernel, warps_of
from oscine.extensions.adapters.entries import cut_of as cut_of_entries
from oscine.extensions.adapters.kernels import (
    Kernels,
    _expand_kernel,
    _shrink_kernel,
    block_of,
    cut_of,
    program_of,
)
from oscine.extensions.adapters.layout import Layout
from oscine.extensions.adapters.products import Norm, Reference, Rows, found_in
from oscine.extensions.adapters.tables import table_kernel
from oscine.model.config import gpt_oss_20b
from oscine.ops.interface import Entries, ExpertTokens, LowRankRows
from oscine.ops.moe import hopper
from tests.ops.bound import target_of
from tests.ops.chips import CHIPS
from tests.ops.compile_ahead import compile_ahead, run_interpreted

from .adapters import memory, random

CPU = torch.device("cpu")
# tokens, columns, rows, rank; each has its reason
TOKENS = {
    "one token": (1, 64, 48, 16),
    "odd columns, a tile of rows that is not full": (5, 136, 200, 16),
    "rank 64": (3, 96, 64, 64),
    "more rows of one adapter than a tile": (40, 64, 64, 32),
    "two tiles of each adapter, and many without": (100, 264, 64, 16),
    "many columns of few rows": (20, 1096, 64, 16),
    "a prompt": (2100, 32, 32, 16),
}
# tokens, experts per token, experts, columns, rows, rank
PAIRS = {
    "one token": (1, 4, 8, 96, 72, 16),
    "few pairs": (3, 4, 8, 136, 200, 16),
    "pairs": (9, 4, 8, 96, 72, 64),
    "more pairs than keys": (60, 4, 5, 1096, 40, 16),
    "a prompt": (1040, 4, 5, 32, 32, 32),
}


def keys(tokens: int, device: torch.device) -> Tensor:
    """The slots of tokens."""
    return torch.randint(-1, 3, (tokens,), generator=torch.Generator().manual_seed(tokens)).int().to(device)


def choice(tokens: int, per_token: int, experts: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, experts, generator=generator).argsort(1)[:, :per_token].int().contiguous().to(device)


def check(name: str, device: torch.device, dtype: torch.dtype, bound: float) -> None:
    tokens, columns, num_rows, rank = TOKENS[name]
    kernels, reference, slots_T = Kernels(target_of(device)), Reference(), keys(tokens, device)
    rows = kernels.rows(slots_T, 3)
    into = memory(rank, columns, seed=1, device=device, dtype=dtype)
    out_of = memory(num_rows, rank, seed=2, device=device, dtype=dtype)
    x = random(tokens, columns, seed=3, device=device, dtype=dtype)
    y = kernels.shrink(x, rows, into, 1)
    expected_y = reference.shrink(x.float(), rows, into, 1)
    _close(y.sum(0)[slots_T >= 0], expected_y[slots_T >= 0], bound)
    before = random(tokens, 2, num_rows, seed=4, device=device, dtype=torch.float32)
    for adds in (True, False):
        out, expected = (before.clone() if adds else torch.full_like(before, torch.nan) for _ in range(2))
        expected[:, 1] = out[:, 1] = 7
        kernels.expand(y, rows, out_of, out, adds=adds)
        reference.expand(expected_y, rows, out_of, expected, adds=adds)
        _close(out, expected, bound)


def check_pairs(name: str, device: torch.device, dtype: torch.dtype, bound: float) -> None:
    """Both products of experts: of tokens, and of activations."""
    tokens, per_token, experts, columns, num_rows, rank = PAIRS[name]
    kernels, reference, count = Kernels(target_of(device)), Reference(), tokens * per_token
    rows = kernels.rows(keys(tokens, device), 3, choice(tokens, per_token, experts, device), experts)
    into = memory(experts, rank, columns, seed=1, device=device, dtype=dtype)
    out_of = memory(experts, num_rows, rank, seed=2, device=device, dtype=dtype)
    weights = torch.rand(count, device=device)
    x, h = (random(n, columns, seed=3, device=device, dtype=dtype) for n in (tokens, count))
    for given, others in (
        (x, {}),
        (h, {"weights_P": weights, "adds": True}),
        (h, {"weights_P": weights}),
    ):
        out, expected = torch.full((2, tokens, per_token, 2, num_rows), 7.0, device=device)
        others = {"adds": False, **others}
        kernels.through(given, rows, into, out_of, out[:, :, 0], **others)
        reference.through(given.float(), rows, into, out_of, expected[:, :, 0], **others)
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
    rows = kernels.rows(keys(tokens, device), 3)
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
    rows = kernels.rows(keys(30, device), 3, choice(30, 4, 7, device), 7)
    assert sorted(_blocks_of(rows)) == sorted((key, row) for row, key in enumerate(rows.keys_P.tolist()))


def _blocks_of(rows: Rows) -> list[tuple[int, int]]:
    """(key, row) of all rows that blocks have."""
    assert rows.order_P is not None
    assert rows.blocks_B3 is not None
    found = []
    for key, start, number in rows.blocks_B3.tolist():
        assert number <= 16
        if number:
            found += [(key, row) for row in rows.order_P[start : start + number].tolist()]
    return found


# tokens, experts, rows of an entry, rank, planes; each with three slots of adapters
ENTRIES = {
    "a few tokens": (7, 5, 8, 16, 2),
    "entries of many rows": (40, 3, 32, 16, 1),
    "more adapters than programs of an entry": (70, 2, 16, 32, 1),
    "rank 64": (9, 4, 4, 64, 2),
}


def cut(ids_TK: Tensor, experts: int, rows: int, planes: int) -> Entries:
    """As the sort of the experts' kernel does."""
    ids_P, pairs = ids_TK.flatten().cpu(), ids_TK.numel()
    counts = torch.bincount(ids_P, minlength=experts).tolist()
    found, start = [], 0
    for expert, count in enumerate(counts):
        found += [[expert, start + begin, min(rows, count - begin), -1] for begin in range(0, count, rows)]
        start += count
    most = min(experts, pairs) + pairs // rows
    table = torch.full((4 + 4 * most,), -1, dtype=torch.int32)
    table[0], table[4 : 4 + 4 * len(found)] = len(found), torch.tensor(found, dtype=torch.int32).flatten()
    order_P = ids_P.argsort(stable=True).int()
    return Entries(table.to(ids_TK.device), order_P.to(ids_TK.device), pairs, most, rows, planes)


def check_entries(name: str, device: torch.device, dtype: torch.dtype, bound: float) -> None:
    tokens, experts, rows, rank, planes = ENTRIES[name]
    columns, per_token, backends = 1104, 2, (Kernels(target_of(device)), Reference())
    entries = cut(choice(tokens, per_token, experts, device), experts, rows, planes)
    factors = experts, rank, columns
    into = memory(*factors, seed=1, device=device, dtype=dtype)
    out_of = memory(experts, 24, rank, seed=2, device=device, dtype=dtype)
    slots_T = keys(tokens, device)
    if "programs" in name:
        slots_T = torch.arange(tokens, dtype=torch.int32, device=device) % 20
        into = random(20, *factors, seed=1, device=device, dtype=dtype)
        out_of = random(20, experts, 24, rank, seed=2, device=device, dtype=dtype)
    x = random(tokens, columns, seed=3, device=device, dtype=dtype)
    h = random(entries.pairs, columns, seed=5, device=device, dtype=torch.float32)
    high = h.to(torch.float8_e4m3fn)
    low = ((h - high.float()) * 16).to(torch.float8_e4m3fn)
    for given, first in ((ExpertTokens(x), True), (ExpertTokens(torch.stack((high, low), 1), 0.5), False)):
        exact = given if given.rows.dim() == 3 else given._replace(rows=x.float())
        made = [
            backend.shrink_entries(tokens, entries, slots_T, into, out_of, first=first)
            for backend, tokens in zip(backends, (given, exact), strict=True)
        ]
        _same_entries(entries, *made, bound)


def _same_entries(entries: Entries, ours: LowRankRows, expected: LowRankRows, bound: float) -> None:
    for entry, (_, first, number) in enumerate(found_in(entries)):
        count = int(expected.lists[entry, 0])
        assert torch.equal(ours.lists[entry, : 1 + count], expected.lists[entry, : 1 + count])
        for j in range(count):
            got, wanted = (one.values_DPR[j, first : first + number].float() for one in (ours, expected))
            _close(got, wanted, bound)
            assert torch.equal(got == 0, wanted == 0), "rows of other adapters, and planes"


def check_choice(device: torch.device, dtype: torch.dtype, bound: float) -> None:
    """The experts of a single token are those of the largest logits; of equal ones the lower goes first."""
    experts, rank, columns = 32, 16, 96
    kernels, reference = Kernels(target_of(device)), Reference()
    logits_TE = torch.zeros(1, experts, device=device)
    logits_TE[0, 7], logits_TE[0, 3], logits_TE[0, 0], logits_TE[0, 1] = 3.0, 2.0, torch.nan, -0.0
    chosen_TK = torch.tensor([[7, 3, 1, 2]], dtype=torch.int32, device=device)
    into = memory(experts, rank, columns, seed=1, device=device, dtype=dtype)
    out_of = memory(experts, 24, rank, seed=2, device=device, dtype=dtype)
    x = ExpertTokens(random(1, columns, seed=3, device=device, dtype=dtype))
    left, known = (Entries(table, None, 4, 4, 1, 2) for table in (logits_TE, chosen_TK))
    assert found_in(left) == found_in(known) == [(7, 0, 1), (3, 1, 1), (1, 2, 1), (2, 3, 1)]
    for slot in (2, -1):
        slots_T = torch.tensor([slot], dtype=torch.int32, device=device)
        expected = reference.shrink_entries(x, known, slots_T, into, out_of, first=True)
        for entries in (left, known):
            ours = kernels.shrink_entries(x, entries, slots_T, into, out_of, first=True)
            assert ours.lists[:, 0].tolist() == [1 if slot >= 0 else 0] * 4
            _same_entries(entries, ours, expected, bound)


def _close(got: Tensor, expected: Tensor, bound: float) -> None:
    assert got.isfinite().all()
    assert (got.double() - expected.double()).norm() <= bound * expected.double().norm()


def in_interpreter() -> None:
    for name in TOKENS:
        check(name, CPU, torch.float32, 1e-5)
    for name in PAIRS:
        check_pairs(name, CPU, torch.float32, 1e-5)
    check_segments(CPU, torch.float32, 1e-5)
    check_table(CPU)
    for name in ENTRIES:
        check_entries(name, CPU, torch.float32, 1e-5)
    check_choice(CPU, torch.float32, 1e-5)


@pytest.mark.slow
def test_kernels_compute_the_definition() -> None:
    run_interpreted(in_interpreter)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TOKENS)
def test_tokens_on_a_gpu(name: str) -> None:
    check(name, torch.device("cuda"), torch.bfloat16, 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_on_a_gpu(name: str) -> None:
    check_pairs(name, torch.device("cuda"), torch.bfloat16, 0.01)


@pytest.mark.gpu
def test_segments_tables_and_planes_on_a_gpu() -> None:
    cuda = torch.device("cuda")
    check_segments(cuda, torch.bfloat16, 0.01)
    check_table(cuda)
    check_choice(cuda, torch.bfloat16, 0.01)


@pytest.mark.hopper
@pytest.mark.parametrize("name", ENTRIES)
def test_entries_on_a_gpu(name: str) -> None:
    check_entries(name, torch.device("cuda"), torch.bfloat16, 0.01)


ARCHS = [arch if arch == 90 else pytest.param(arch, marks=pytest.mark.slow) for arch in CHIPS]


def options_of(arch: int) -> dict[str, object]:
    return {"PDL": arch >= 90, **({"launch_pdl": True} if arch >= 90 else {})}


@pytest.mark.compiles
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("of", ["tokens", "few pairs", "pairs"])
@pytest.mark.parametrize("rank", [16, 64])
def test_kernels_compile(arch: int, of: str, rank: int) -> None:
    options, is_few = options_of(arch) | program_of(rank), of == "few pairs"
    names = {"keys"} | (set() if is_few else {"order", "blocks"}) | (set() if of == "tokens" else {"ids"})
    common = {**dict.fromkeys(names, "*i32"), "count": "i32", "slot_stride": "i32"}
    missing = dict.fromkeys({"ids", "order", "blocks"} - names)
    block_c, steps, splits = cut_of(2880, rank, 4 if is_few else 256)
    experts = {"E": 1, "K": 1} if of == "tokens" else {"E": 128, "K": 4}
    constants: dict[str, object] = {"BLOCK_P": 16, "SEGMENTS": 1, "RANK": rank, "PDL": options.pop("PDL"), **experts}
    shrink = {"x": "*bf16", "into": "*bf16", "y": "*fp32", **common}
    cut = {"COLUMNS": 2880, "STEPS": steps, "STAGES": 4, "BLOCK_C": block_c, "PER_TOKEN": 1}
    compile_ahead(_shrink_kernel, shrink, constants | cut | missing, arch=arch, **options)
    expand = {"y": "*fp32", "out_of": "*bf16", "out": "*bf16", "eps": "fp32", **common}
    expand |= dict.fromkeys(("first", "second", "tiles", "token_stride", "pair_stride"), "i32")
    others = {"ROWS": 5760, "SPLITS": splits, "SQUARES": 0, "WIDTH": 1, "squares": None, "weights": None, "ADDS": False}
    others |= missing | {"BLOCK_N": block_of(rank), "STAGES": 4 if of == "pairs" else 0}
    compile_ahead(_expand_kernel, expand, constants | others, arch=arch, **options)


@pytest.mark.compiles
@pytest.mark.parametrize(("rows", "rank"), [(1, 16), (8, 16), (32, 64), (128, 16), (128, 64)])
def test_the_kernel_of_entries_compiles(rows: int, rank: int) -> None:
    """For one token, a few in planes, and many in fp16."""
    lone, planes, block_p, most = rows == 1, 2 if rows <= 8 else 1, max(LEAST_ROWS, rows), min(rows, 8)
    entries = 4 if lone else 36 if rows == 8 else 48
    _, splits, steps, block_c = cut_of_entries(2880, rank, rows, most, entries, 132)
    for first in (True, False):
        x = "*bf16" if first else "*fp8e4nv" if planes == 2 else "*fp16"
        signature = {"x": x, "into": "*bf16", "out_of": "*bf16", "values": "*bf16", "scale": "fp32"}
        signature |= {"table": "*fp32"} if lone else {"table": "*i32", "order": "*i32"}
        signature |= dict.fromkeys(("keys", "lists"), "*i32") | dict.fromkeys(
            ("num_pairs", "into_stride", "out_stride"), "i32"
        )
        constants = {"E": 128, "K": 4, "CHOICE": lone, "COLUMNS": 2880, "ROWS": 5760, "RANK": rank, "STAGES": 4}
        constants |= {"MOST": most, "FIRST": first, "PLANES": x == "*fp8e4nv", "OUT_PLANES": planes}
        assert (steps == 1) == (rows <= 8)
        signature |= {"arrived": "*i32"} | ({"partial": "*fp32"} if splits > 1 else {})
        constants |= {} if splits > 1 else {"partial": None}
        constants |= {"BLOCK_P": block_p, "BLOCK_C": block_c, "STEPS": steps, "SPLITS": splits, "PDL": True}
        constants |= {"order": None} if lone else {}
        compile_ahead(_entries_kernel, signature, constants, num_warps=warps_of(block_p, rank), launch_pdl=True)


@pytest.mark.compiles
@pytest.mark.parametrize("few", [True, False])
def test_the_first_product_of_pairs_waits_before_later_kernels_begin(few: bool) -> None:
    """These read the experts of tokens and the table of rows without waiting, as the product itself does."""
    names = {"keys", "ids"} | (set() if few else {"order", "blocks"})
    signature = {"x": "*bf16", "into": "*bf16", "y": "*fp32", **dict.fromkeys(names, "*i32")}
    signature |= {"count": "i32", "slot_stride": "i32"}
    block_c, steps, _ = cut_of(2880, 16, 4 if few else 256)
    constants = {"BLOCK_P": 16, "SEGMENTS": 1, "RANK": 16, "PDL": True, "E": 128, "K": 4, "COLUMNS": 2880}
    constants |= {"STEPS": steps, "STAGES": 4, "BLOCK_C": block_c, "PER_TOKEN": 1}
    constants |= dict.fromkeys({"order", "blocks"} - names)
    ptx = compile_ahead(_shrink_kernel, signature, constants, launch_pdl=True, **program_of(16)).ptx
    before = ptx[: ptx.index("griddepcontrol.launch_dependents")]
    assert "griddepcontrol.wait" in before
    assert "ld.global" not in before


@pytest.mark.compiles
def test_lists_of_adapters_are_written_after_the_kernel_before() -> None:
    """They may lie where that one's values are. The last store is that of how many there are."""
    signature = {"x": "*fp8e4nv", "into": "*bf16", "out_of": "*bf16", "values": "*bf16", "scale": "fp32"}
    signature |= dict.fromkeys(("table", "order", "keys", "lists", "arrived"), "*i32") | {"partial": "*fp32"}
    signature |= dict.fromkeys(("num_pairs", "into_stride", "out_stride"), "i32")
    constants = {"E": 32, "K": 4, "CHOICE": False, "COLUMNS": 2880, "ROWS": 2880, "RANK": 16, "STAGES": 4, "MOST": 8}
    constants |= {"FIRST": False, "PLANES": True, "OUT_PLANES": 2, "BLOCK_P": 16, "BLOCK_C": 512, "STEPS": 1}
    constants |= {"SPLITS": 6, "PDL": True}
    ptx = compile_ahead(_entries_kernel, signature, constants, num_warps=4, launch_pdl=True).ptx
    assert ptx.rindex("griddepcontrol.wait") < ptx.rindex("st.global")


def test_descriptors_of_many_adapters_have_sizes_of_32_bits() -> None:
    """256 of rank 16 of 20b take 85 GiB."""
    layout = Layout.of(gpt_oss_20b(), ("experts",), 16)
    memory = torch.empty(256, layout.size, dtype=torch.bfloat16, device="meta")
    out_of = layout.view(memory, 23, "gate_up_out")
    assert out_of is not None
    values = torch.empty(1, 4, 2, 16, dtype=torch.bfloat16, device="meta")
    lists = torch.empty(4, 2, dtype=torch.int32, device="meta")
    factors, _, _ = hopper._added(LowRankRows(values, lists, out_of), hopper.plan(1, 4, 32, 2880))
    assert max(factors.shape) < 1 << 31
    assert all(stride * 2 % 16 == 0 for stride in factors.strides[:-1])


@pytest.mark.compiles
@pytest.mark.parametrize("dense", [True, False])
def test_the_table_compiles(dense: bool) -> None:
    names = ("keys", "ids", "order", "blocks")
    signature = dict.fromkeys(names, "*i32") | dict.fromkeys(("count", "num_keys"), "i32")
    constants = {"E": 32, "K": 4, "DENSE": dense, "STEP": 1024, "BLOCK_P": 16, "PDL": True}
    assert compile_ahead(table_kernel, signature, constants, num_warps=4, launch_pdl=True).spills == 0
