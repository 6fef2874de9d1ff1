"""The ops of a draft head for GPUs: interpreted on a CPU, compiled ahead of a GPU, and on a GPU.

The oracle is the reference on weights that are what the 4 bits stand for. How far these are from the weights as
published has a bound of its own.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.inputs import sampling_batch
from oscine.extensions.speculation.ops import reference
from oscine.extensions.speculation.ops.interface import DraftOps, DraftState, SliceOfHead
from oscine.extensions.speculation.ops.table import resolve_draft
from oscine.extensions.speculation.ops.weights import PackedMatrix, pack, unpack
from oscine.ops.interface import Batch, SamplingBatch
from oscine.ops.packed import REJECTED, PackedSizes, PackedStep
from oscine.ops.platforms.interface import Platform
from oscine.ops.platforms.table import PLATFORMS
from tests.ops.bound import bound
from tests.ops.chips import CHIPS
from tests.ops.compile_ahead import Compiled, marked, run_interpreted
from tests.ops.launches import META, Launch, noted

# Rows and columns of weights, and tokens: 1 without tensor cores, from 2 and from 17 on with tiles of their own.
CASES = (
    (1, 1, 1),
    (1, 1, 2),
    (5, 33, 1),  # no whole block, more rows than one program has
    (34, 33, 16),
    (65, 33, 17),
    (130, 1, 65),  # two programs of tokens, and more of rows
    (6, 2112, 1),  # several steps, the last one not whole
    (6, 1056, 3),
    (6, 11616, 1),  # two parts of the sum, the last one shorter
    (4, 11616, 2),
)
CHOICES = (1, 33, 1), (1, 33, 2), (70, 64, 1), (70, 64, 3), (130, 1, 65)
ERROR = 0.1  # of normally distributed weights, relative; 8.8 % are expected
HIDDEN, INNER, HEADS, DRAFTED = 2880, 17280, 80 * 64, 32768  # of NVIDIA's EAGLE3-v3
PUBLISHED = (HEADS, 2 * HIDDEN), (HIDDEN, INNER)


def kernels() -> ModuleType:
    from oscine.extensions.speculation.ops import triton

    return triton


def random(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def test_what_is_packed_is_near_the_weights() -> None:
    weight = random(64, 2880) * 0.02
    assert float((unpack(pack(weight)) - weight).norm() / weight.norm()) < ERROR
    assert len(pack(weight)) == 64


def test_blocks_have_scales_of_their_own() -> None:
    """A loud block, a silent row, and a row of tiny weights leave the error of the others as it is."""
    weight = random(4, 96)
    weight[0, :32] *= 1000
    weight[1] = 0
    weight[2] *= 1e-20
    found = unpack(pack(weight))
    for quiet in (slice(32, 64), slice(64, 96)):
        assert (found[0, quiet] - weight[0, quiet]).norm() < 1.5 * ERROR * weight[0, quiet].norm()
    assert not found[1].any()
    assert (found[2] - weight[2]).norm() < 1.5 * ERROR * weight[2].norm()


def test_packed_integers_times_scales_are_exact_in_bfloat16() -> None:
    matrix = pack(random(32, 320))
    alone = PackedMatrix(matrix.words_NW, matrix.scales_NB, torch.ones(32), matrix.columns)
    assert torch.equal(unpack(alone).bfloat16().float(), unpack(alone))


def test_a_weight_is_the_nearest_that_its_scale_allows() -> None:
    weight = random(3, 64)
    matrix = pack(weight)
    scale = matrix.scales_NB.int().sub(248).div(8)  # 8 e + m, from 2^0 on
    step = torch.exp2(scale.floor()) * (1 + scale - scale.floor()) * matrix.row_scale_N[:, None]
    step = step.repeat_interleave(32, 1)
    inside = (weight > -8.5 * step) & (weight < 7.5 * step)
    assert inside.float().mean() > 0.9
    assert ((unpack(matrix) - weight).abs() <= 0.5001 * step)[inside].all()


def check_products(device: str, dtype: torch.dtype, cases: tuple[tuple[int, int, int], ...]) -> None:
    """Against products of the same weights in float64, to the rounding of float32 sums and of the result."""
    for rows, columns, tokens in cases:
        matrix = pack(random(rows, columns, device=device))
        x = random(tokens, columns, device=device).to(dtype)
        expected = x.double() @ unpack(matrix).double().T
        tolerance = 2e-6 * float(x.double().norm(dim=1).max() * unpack(matrix).double().norm(dim=1).max())
        close = partial(torch.testing.assert_close, rtol=torch.finfo(dtype).eps, atol=tolerance)
        close(bound(kernels().linear)(x, matrix).double(), expected)
        close(bound(kernels().sums)(x, matrix).double().sum(1), expected)
        if rows % 2 == 0:
            gate, value = expected.chunk(2, 1)
            found = bound(kernels().gated)(x, matrix).double()
            scale = 1 + float(expected.abs().max())
            torch.testing.assert_close(
                found, gate * gate.sigmoid() * value, rtol=2 * torch.finfo(dtype).eps, atol=3 * scale * tolerance
            )


def check_choice(device: str, dtype: torch.dtype, cases: tuple[tuple[int, int, int], ...]) -> None:
    for rows, columns, tokens in cases:
        matrix = pack(random(rows, columns, device=device))
        ids = torch.randperm(3 * rows, generator=torch.Generator().manual_seed(rows))[:rows].to(device)
        for greedy in (True, False):
            sampling = choices_of(tokens, torch.device(device), greedy=greedy)
            x = random(tokens, columns, device=device).to(dtype)
            found = bound(kernels().choose)(x, SliceOfHead(matrix, ids), sampling)
            expected = reference.choose(x.float(), SliceOfHead(unpack(matrix), ids), sampling)
            assert torch.equal(found, expected), (rows, columns, tokens, greedy)


def choices_of(tokens: int, device: torch.device, *, greedy: bool) -> SamplingBatch:
    heat = torch.tensor([0.7, 0.0, 1.3])[torch.arange(tokens) % 3] * (not greedy)
    place = torch.arange(tokens) * 1_000_003 + (1 << 33)
    return sampling_batch(
        tokens,
        device,
        greedy=greedy,
        temperature_N=heat.to(device),
        seed_N=place.to(device),
        position_N=place.to(device),
    )


def check_input(device: str) -> None:
    for tokens, hidden in ((1, 64), (3, 33)):
        table, features = random(7, hidden, device=device), random(tokens, hidden, device=device)
        norms = random(hidden, device=device), random(hidden, device=device) + 1
        ids = (torch.arange(tokens) * 3 % 7).to(device)
        arguments = ids, table, norms[0], features, norms[1], 1e-5
        for found, expected in zip(bound(kernels().input)(*arguments), reference.input(*arguments), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def state_of(slots: int, hidden: int, device: str) -> DraftState:
    return DraftState(
        features=random(slots + 1, hidden, device=device),
        lens=torch.arange(1, slots + 2, dtype=torch.int32, device=device),
        temperatures=torch.rand(slots + 1, device=device),
        seeds=torch.arange(slots + 1, device=device) * (1 << 40),
    )


def check_state(device: str) -> None:
    """Sequences of 3, 1, 2 and 4 rows, of which some drafts are rejected; then a prompt's end, and two of padding.

    The first row of the fourth has a slot of its own: a row that another one follows leaves nothing.
    """
    given = [-1, -2, -3, -1, -1, -2, -1, -2, -3, -4, 8, 9, -1, -1]
    rows = [*range(10), 11, 12, 13]
    slots = [4, 4, 4, 0, 2, 2, 5, 1, 1, 1, 3, 6, 6]
    ids = [6, 7, REJECTED, 3, 5, REJECTED, 1, 2, 3, -1, 4, 0, 0]
    sizes = PackedSizes(len(given), len(slots), len(rows), len(slots))
    packed = PackedStep.of(torch.zeros(sizes.total, dtype=torch.int32), sizes)
    for column, values in ((packed.given_T, given), (packed.logits_rows_N, rows), (packed.sampled_slots_M, slots)):
        column[:] = torch.tensor(values)
    packed = PackedStep(*(column.to(device) for column in packed))
    empty = torch.empty(0, device=device)
    positions = (torch.arange(len(given)) * 7).to(device)
    batch = Batch(positions, positions, empty, empty, (), None)
    for count, hidden in ((len(ids), 40), (4, 1), (1, 64)):
        features = random(len(given), hidden, device=device)
        found, expected = state_of(6, hidden, device), state_of(6, hidden, device)
        chosen = torch.tensor(ids[:count]).to(device)
        next_ids = bound(kernels().hold)(packed, batch, chosen, features, found)
        assert torch.equal(next_ids, reference.hold(packed, batch, chosen, features, expected))
        assert torch.equal(found.features[:6], expected.features[:6])
        assert torch.equal(found.lens[:6], expected.lens[:6])
    drawn = torch.tensor([3, 0, 5, 3, 5], dtype=torch.int32).to(device)
    for some in (drawn[:2], drawn):
        assert torch.equal(bound(kernels().held)(some, found), reference.held(some, found))
        places = positions[: len(some)]
        for name in ("temperature_N", "seed_N", "position_N"):
            noise = bound(kernels().sampling)(some, places, found)
            assert torch.equal(getattr(noise, name), getattr(reference.sampling(some, places, found), name))
    written, wanted = (torch.zeros(6, 3, dtype=torch.int32, device=device) for _ in range(2))
    for place in range(3):
        bound(kernels().put)(written, place, drawn[:3], positions[:3] + place)
        reference.put(wanted, place, drawn[:3], positions[:3] + place)
    assert torch.equal(written, wanted)


def check_keys_alone(device: str) -> None:
    """`fill` rotates keys without queries."""
    qkv, table = random(3, 4 * 16, device=device), random(50, 16, device=device)
    places, slots = torch.tensor([4, 0, 49]).to(device), torch.tensor([7, 0, 3]).to(device)
    pools = [torch.full((2, 2, 2, 4, 16), torch.nan, device=device) for _ in range(2)]
    assert bound(kernels().rope_and_write)(qkv, table, places, pools[0], slots).shape == (3, 0, 16)
    reference.rope_and_write(qkv, table, places, pools[1], slots)
    torch.testing.assert_close(*pools, rtol=1e-6, atol=1e-6, equal_nan=True)


def interpreted_products() -> None:
    check_products("cpu", torch.float32, CASES)


def interpreted_choice() -> None:
    check_choice("cpu", torch.float32, CHOICES)


def interpreted_rest() -> None:
    check_input("cpu")
    check_state("cpu")
    check_keys_alone("cpu")


@pytest.mark.parametrize("check", [interpreted_products, interpreted_choice, interpreted_rest])
def test_interpreted(check: Callable[[], None]) -> None:
    run_interpreted(check)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def empty_matrix(rows: int, columns: int) -> PackedMatrix:
    blocks = columns // 32
    words, scales = empty(rows, 4 * blocks, dtype=torch.int32), empty(rows, blocks, dtype=torch.uint8)
    return PackedMatrix(words, scales, empty(rows, dtype=torch.float32), columns)


def launched(tokens: int, arch: int) -> list[Launch]:
    """All launches of a step of NVIDIA's EAGLE3-v3."""
    target, long = CHIPS[arch], torch.int64
    with noted(target) as found:
        x, ids = empty(tokens, HIDDEN), empty(tokens, dtype=long)
        kernels().input(target, ids, empty(201088, HIDDEN), x[0], x, x[0], 1e-5)
        kernels().linear(target, empty(tokens, 3 * HIDDEN), empty_matrix(HIDDEN, 3 * HIDDEN))
        kernels().linear(target, empty(tokens, 2 * HIDDEN), empty_matrix(HEADS, 2 * HIDDEN))
        kernels().linear(target, empty(tokens, 2 * HIDDEN), empty_matrix(1024, 2 * HIDDEN))
        kernels().sums(target, empty(tokens, 4096), empty_matrix(HIDDEN, 4096))
        kernels().gated(target, x, empty_matrix(2 * INNER, HIDDEN))
        kernels().sums(target, empty(tokens, INNER), empty_matrix(HIDDEN, INNER))
        slots = empty(tokens, dtype=torch.int32)
        state = DraftState(empty(9, HIDDEN), slots, empty(9, dtype=torch.float32), empty(9, dtype=long))
        drawn = kernels().sampling(target, slots, ids, state)
        kernels().choose(target, x, SliceOfHead(empty_matrix(DRAFTED, HIDDEN), empty(DRAFTED, dtype=long)), drawn)
        packed = PackedStep.of(empty(PackedSizes(3, 3, 3, 3).total, dtype=torch.int32), PackedSizes(3, 3, 3, 3))
        kernels().hold(target, packed, Batch(ids, ids, ids, ids, (), None), ids, x, state)
        kernels().held(target, slots, state)
        kernels().put(target, empty(9, 3, dtype=torch.int32), 1, slots, ids)
    return found


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("tokens", "arch", "least"),
    [
        (1, 90, {"LDG.E.128": 8, "ACQBULK": 1}),
        pytest.param(16, 90, {"HMMA": 32}, marks=pytest.mark.slow),
        pytest.param(64, 90, {"HGMMA": 16}, marks=pytest.mark.slow),
        pytest.param(1, 80, {}, marks=pytest.mark.slow),
        pytest.param(64, 80, {"HMMA": 32}, marks=pytest.mark.slow),
        pytest.param(64, 100, {}, marks=pytest.mark.slow),
        pytest.param(64, 120, {}, marks=pytest.mark.slow),
    ],
)
def test_compiled_for_the_published_head(tokens: int, arch: int, least: dict[str, int]) -> None:
    """Each kernel fits the chip without spills; gates and values have the instructions that their speed needs."""
    found = launched(tokens, arch)
    assert len(found) == 13
    for launch in found:
        compiled = launch.compile(arch)
        if dict(launch._named).get("GATED"):
            check_instructions(compiled, least)


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("tokens", "least"),
    marked([(16, {"HMMA": 32}), (64, {"HGMMA": 16})], newest=[(64, {"HGMMA": 16})], oldest=[(16, {"HMMA": 32})]),
)
def test_gates_and_values_use_tensor_cores(tokens: int, least: dict[str, int]) -> None:
    [gated] = [launch for launch in launched(tokens, 90) if dict(launch._named).get("GATED")]
    check_instructions(gated.compile(90), least)


def check_instructions(compiled: Compiled, least: dict[str, int]) -> None:
    counts = {name: compiled.sass.count(f" {name}") for name in least}
    assert all(counts[name] >= count for name, count in least.items()), counts


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_on_a_gpu(dtype: torch.dtype) -> None:
    check_products(
        "cuda", dtype, (*CASES, *((*shape, tokens) for shape in PUBLISHED for tokens in (1, 4, 8, 32, 2048)))
    )


@pytest.mark.gpu
def test_the_rest_on_a_gpu() -> None:
    check_choice("cuda", torch.bfloat16, (*CHOICES, *((DRAFTED, HIDDEN, tokens) for tokens in (1, 4, 8, 32, 256))))
    check_input("cuda")
    check_state("cuda")
    check_keys_alone("cuda")


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform.name)
def test_every_platform_has_all_ops(platform: Platform) -> None:
    ops = resolve_draft(CHIPS[90], platform)
    assert all(callable(getattr(ops, field.name)) for field in fields(DraftOps))
    assert (getattr(ops.prepare, "__module__", None) == "oscine.extensions.speculation.ops.triton") == (
        platform.uses_triton
    )
