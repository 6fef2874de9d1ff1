"""Choosing without all logits gives the token that all logits would give, for any weights."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from benchmarks.kernels.inputs import sampling_batch
from oscine.ops.choose import hopper as screened
from oscine.ops.choose import hopper_gemm as screen_gemm
from oscine.ops.choose.few import choose_few
from oscine.ops.choose.screen_size import screen_bytes
from oscine.ops.interface import SamplingBatch
from oscine.ops.launch import arrivals
from oscine.ops.linear.hopper_stream import CHUNK_BYTES
from oscine.ops.platforms.table import choose, resolve
from oscine.ops.sample import reference
from oscine.ops.sample.noise import gumbel
from oscine.ops.target import Communicator
from tests.ops.bound import CPU_TARGET, bound, target_of
from tests.ops.compile_ahead import compile_ahead, marked
from tests.ops.gluon_interpreter import run_gluon
from tests.ops.ranks import best_in_turn, on_every_rank

CPU = torch.device("cpu")
HIDDEN = 96
SCORES = {"rough": "*fp32", "row_norm": "*fp32", "row_rest": "*fp32", "norm": "*fp32", "rest": "*fp32"}
DRAWN = {"temperature": "*fp32", "seed": "*i64", "position": "*i64", "vocab": "i32"}


def heads(vocab: int, hidden: int) -> dict[str, Tensor]:
    """Weights [V, H] by what is hard about them."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(vocab, hidden, generator=generator) * 0.02
    alike, loud, twins = normal.clone(), normal.clone(), normal.clone()
    alike[100:140] = normal[:1] * 3 + alike[100:140] * 0.001  # int8 cannot tell them apart
    loud[:, 7] *= 20
    twins[vocab // 2 : vocab // 2 * 2] = twins[: vocab // 2]
    signs = normal.sign() * 0.02  # without dither, the low bits of all codes of a sign are the same
    signs[range(vocab), torch.arange(vocab) % hidden] *= 4
    kinds = {"nothing": normal, "some nearly alike": alike, "one loud column": loud, "each twice": twins}
    return kinds | {"two magnitudes": signs}


def activations(num_rows: int, weight_VH: Tensor) -> Tensor:
    """[N, H]. The first row prefers the first token and its like, and has an outlier. The last has the signs of the
    first token's weights."""
    x_NH = torch.randn(num_rows, weight_VH.shape[1], generator=torch.Generator().manual_seed(num_rows))
    x_NH[0] += 100 * weight_VH[0].cpu()
    x_NH[0, 3] = 40
    if num_rows > 1:
        x_NH[-1] = weight_VH[0].cpu().sign()
    return x_NH


def batch(num_rows: int, device: torch.device, *, greedy: bool) -> SamplingBatch:
    heat_N = torch.tensor([0.0, 1.0, 0.3, 2.0, 1e-30])[torch.arange(num_rows) % 5] * (not greedy)
    return sampling_batch(num_rows, device, temperature_N=heat_N.to(device), greedy=greedy)


def check_choice(weight_VH: Tensor, x_NH: Tensor, sampling: SamplingBatch, *, coarse: bool = True) -> None:
    """The score of what is chosen is the best, to what rounding leaves; the id too, where it is the only such one."""
    screen = screened.prepare(weight_VH)
    assert screen is not None
    chosen_N = bound(screened.screened)(x_NH, weight_VH, replace(screen, is_coarse=coarse), sampling)
    logits_NV = x_NH.double() @ weight_VH.double().T
    expected_N = reference.sample(logits_NV.float(), sampling).token_ids_N
    for row in (chosen_N != expected_N).nonzero().flatten().tolist():
        assert sampling.temperature_N[row] < 1e-20, "noise makes ties unlikely"
        best, other = logits_NV[row, expected_N[row]], logits_NV[row, chosen_N[row]]
        assert best - other < 1e-6 * x_NH[row].norm() * weight_VH[chosen_N[row]].norm()
    assert not arrivals(x_NH.device).any()


def conspiring(hidden: int) -> tuple[Tensor, Tensor]:
    """Weights and one row of activations: 8 bits put the last token far ahead of the first, which is the best.

    All that the codes leave of both rows points along the activations, so that the bound is met to nine tenths.
    """
    generator = torch.Generator().manual_seed(0)
    weight_VH = torch.randn(300, hidden, generator=generator) / 64
    screen = screened.prepare(weight_VH)
    assert screen is not None
    sign_H = torch.randint(0, 2, (hidden,), generator=generator) * 2.0 - 1
    sign_H[:2] = 0  # where the two have their largest weight, by which codes are scaled
    step = 1 / 512
    ahead_H = torch.arange(hidden) < 0.8 * hidden
    integers_H = screen.dither_H.round() - screen.dither_H  # codes become integers with these
    weight_VH[0] = (integers_H + (3 + 0.45) * sign_H) * step
    weight_VH[-1] = (integers_H + (3 + ahead_H.float() - 0.45) * sign_H) * step
    weight_VH[0, 0] = weight_VH[-1, 1] = screened.MAX_CODE * step
    return weight_VH, sign_H[None]


def check_ranks(weight_VH: Tensor, x_NH: Tensor, sampling: SamplingBatch, num_ranks: int) -> None:
    """Ranks that have equal parts of the vocabulary choose together what one rank with all of it chooses."""

    def choose(own: Communicator) -> Tensor:
        part_VH = weight_VH.chunk(num_ranks)[own.rank]
        screen = screened.prepare(part_VH)
        assert screen is not None
        return screened.screened(replace(target_of(x_NH.device), communicator=own), x_NH, part_VH, screen, sampling)

    alone_N = bound(screened.screened)(x_NH, weight_VH, screened.prepare(weight_VH), sampling)
    assert torch.equal(best_in_turn(num_ranks, choose), alone_N)


def interpret_ranks() -> None:
    made = heads(2200, HIDDEN)
    for name, num_ranks, num_rows, greedy in (
        ("nothing", 2, 4, False),
        ("some nearly alike", 4, 1, False),
        ("each twice", 2, 2, True),  # of equal tokens on two ranks, that of the lower rank
        ("one loud column", 8, 3, True),
    ):
        weight_VH = made[name].bfloat16()
        check_ranks(
            weight_VH, activations(num_rows, weight_VH).bfloat16(), batch(num_rows, CPU, greedy=greedy), num_ranks
        )
    nothing_NH = torch.full((1, HIDDEN), torch.nan).bfloat16()
    check_ranks(made["nothing"].bfloat16(), nothing_NH, batch(1, CPU, greedy=True), 2)


def interpret_choices() -> None:
    for name, weight_VH in heads(1100, HIDDEN).items():
        for num_rows, greedy in ((3, False), (4, True)) if name == "nothing" else ((5, False), (4, True)):
            x_NH = activations(num_rows, weight_VH).bfloat16()
            check_choice(weight_VH.bfloat16(), x_NH, batch(num_rows, CPU, greedy=greedy))
        check_choice(weight_VH.bfloat16(), x_NH, batch(4, CPU, greedy=True), coarse=False)
    weight_VH, x_NH = conspiring(HIDDEN)
    for coarse in (False, True):
        check_choice(weight_VH.bfloat16(), x_NH.bfloat16(), batch(1, CPU, greedy=True), coarse=coarse)
    for num_rows, scale in ((1, 1.0), (6, 0.5), (40, 10.0)):
        check_floor(num_rows, scale)
    twins_VH = heads(1100, HIDDEN)["each twice"].bfloat16()
    [first] = bound(screened.screened)(
        activations(1, twins_VH).bfloat16(),
        twins_VH,
        screened.prepare(twins_VH),
        batch(1, CPU, greedy=True),
    ).tolist()
    assert first < 550  # the lower of two
    nothing_VH = torch.zeros(100, HIDDEN).bfloat16()
    check_choice(nothing_VH, torch.zeros(3, HIDDEN).bfloat16(), batch(3, CPU, greedy=False))
    for name, weight_VH in heads(300, HIDDEN).items():
        check_bounds(name, weight_VH, activations(8, weight_VH))
    check_what_is_read()
    check_a_token_is_left()
    for hidden in (768, 1056):  # 3 and 5 steps of the ring, the last one not full
        weight_VH = heads(200, hidden)["nothing"]
        check_bounds("nothing", weight_VH, activations(3, weight_VH))
        for num_rows in (2, 40):
            x_NH = activations(num_rows, weight_VH).bfloat16()
            check_choice(weight_VH.bfloat16(), x_NH, batch(num_rows, CPU, greedy=True))
    check_bounds("conspiring", *conspiring(HIDDEN), tight=True)
    check_no_choice(heads(300, HIDDEN)["nothing"].bfloat16())


def check_no_choice(weight_VH: Tensor) -> None:
    """A row with NaN or infinity has no token; the others keep theirs."""
    x_NH = activations(4, weight_VH).to(weight_VH)
    broken_NH = x_NH.clone()
    broken_NH[1] = torch.nan
    broken_NH[2, 5] = torch.inf
    screen = screened.prepare(weight_VH)
    assert screen is not None
    for greedy in (True, False):
        sampling = batch(4, x_NH.device, greedy=greedy)
        expected_N = bound(screened.screened)(x_NH, weight_VH, screen, sampling)
        expected_N[1:3] = -1
        assert torch.equal(bound(screened.screened)(broken_NH, weight_VH, screen, sampling), expected_N)


def check_bounds(name: str, weight_VH: Tensor, x_NH: Tensor, *, tight: bool = False) -> None:
    """No logit is further from its estimate than it is said to be, and that is little; `tight`: one nearly so far."""
    weight_VH, x_NH = weight_VH.bfloat16(), x_NH.bfloat16()
    screen = screened.prepare(weight_VH)
    assert screen is not None
    scaled_NH, exact_NV = x_NH.double() * screen.column_H, x_NH.double() @ weight_VH.double().T
    misleads: dict[bool, bool] = {}
    for coarse in (False, True):
        screen = replace(screen, is_coarse=coarse)
        tile = screen.tile(len(x_NH))
        assert tile.whole != coarse
        planes, scale_N, shift_N, norm_N, rest_N = bound(screened.quantize)(x_NH, screen, tile)
        high_NH, low_NH = planes.permute(2, 3, 1, 0, 4).flatten(3)[:, : len(x_NH), :, : x_NH.shape[1] // 2].flatten(2)
        coded_NH = (high_NH.double() * 128 + low_NH) * scale_N[:, None]
        torch.testing.assert_close(norm_N.double(), scaled_NH.norm(dim=1))
        torch.testing.assert_close(rest_N.double(), (scaled_NH - coded_NH).norm(dim=1), rtol=1e-3, atol=1e-7)
        assert (rest_N < 1e-3 * norm_N).all()
        rough_NV = screen_gemm.logits(CPU_TARGET, planes, scale_N, shift_N, screen.codes_2VJ, screen.scale_V, tile)
        rest_V = screened.COARSE_BOUND * screen.scale_V if coarse else screen.rest_V
        bound_NV = rest_V * (norm_N + rest_N)[:, None] + screen.norm_V * (rest_N + 2**-18 * norm_N)[:, None]
        error_NV = rough_NV - exact_NV
        assert (error_NV.abs() <= bound_NV).all(), name
        if coarse:
            if name == "nothing":
                check_low_bits(error_NV / (screen.scale_V * norm_N[:, None]))
        elif tight:
            assert (error_NV.abs() > 0.9 * bound_NV).any()
        else:
            assert (bound_NV <= 0.013 * norm_N[:, None] * screen.norm_V).all(), name
        misleads[coarse] = bool((rough_NV.argmax(1) != exact_NV.argmax(1)).any())
    # Else a choice without bounds would pass as well.
    assert misleads[False] or name != "conspiring"
    assert misleads[True] or name not in ("conspiring", "some nearly alike")


def check_low_bits(error_NV: Tensor) -> None:
    """error_NV: of logits without the low bits, in scales, for activations of norm 1. The weights are normally
    distributed."""
    deviation = 16 / 12**0.5
    assert (error_NV.abs() < 2 * deviation).double().mean() > 0.93  # normally distributed: 0.954
    assert error_NV.std() == pytest.approx(deviation, rel=0.1)
    # The last row is signs of weights: nothing that it adds up may be off on average.
    assert abs(error_NV[-1].mean()) < 4 * deviation / len(error_NV[0]) ** 0.5


def check_floor(num_rows: int, scale: float) -> None:
    """The floor of each row is the exact score of the token with the highest lower bound, and the choice is exact."""
    generator = torch.Generator().manual_seed(num_rows)
    weight_VH = (torch.randn(1100, HIDDEN, generator=generator) * scale).bfloat16()
    x_NH = torch.randn(num_rows, HIDDEN, generator=generator).bfloat16()
    heat_N = torch.tensor([1.0, 0.0, 0.3, 2.0, 5.0])[torch.arange(num_rows) % 5]
    position_N = torch.arange(num_rows)
    sampling = sampling_batch(num_rows, CPU, temperature_N=heat_N, position_N=position_N)
    screen = screened.prepare(weight_VH)
    assert screen is not None
    made: dict[str, Tensor] = {}

    def kept(*arguments: Any, **constants: Any) -> None:
        kernel[grid_of[0]](*arguments, **constants)
        made.update(rough=arguments[0].clone(), floor=arguments[16].clone())

    kernel, grid_of = screened.floor_kernel, [(0, 0)]

    class Kept:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            grid_of[0] = grid
            return kept

    screened.floor_kernel = Kept()
    try:
        chosen_N = bound(screened.screened)(x_NH, weight_VH, screen, sampling)
    finally:
        screened.floor_kernel = kernel
    noise_NV = gumbel(sampling.seed_N, position_N, len(weight_VH)).double() * (heat_N != 0)[:, None]
    heat_N1 = torch.where(heat_N == 0, 1, heat_N).double()[:, None]
    score_NV = x_NH.double() @ weight_VH.double().T / heat_N1 + noise_NV
    bound_NV = screened.COARSE_BOUND * screen.scale_V * (x_NH.double() * screen.column_H).norm(dim=1, keepdim=True)
    likely_N = ((made["rough"].double() - bound_NV) / heat_N1 + noise_NV).argmax(1)
    expected_N = score_NV.gather(1, likely_N[:, None])[:, 0]
    torch.testing.assert_close(made["floor"].double(), expected_N, rtol=1e-5, atol=1e-5)
    assert torch.equal(chosen_N, score_NV.argmax(1))


def check_what_is_read() -> None:
    """Rows are screened by the high bits if is_coarse; and then by their bound, as follows.

    Two tokens: the first is better by little, and what the low bits say of the two points along the activations. The
    bound of all bits would exclude the first.
    """
    weight_VH = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    made = screened.prepare(weight_VH)
    assert made is not None
    for is_coarse in (False, True):
        screen = replace(made, is_coarse=is_coarse)
        assert {screen.tile(rows).whole for rows in (1, 8, 9, 64)} == {not is_coarse}
    high_2H = torch.cat([made.codes_2VJ[0] << 4, made.codes_2VJ[0] & -16], dim=1).double()
    read_2H = (high_2H + 7.5 - made.dither_H) * made.scale_V[:, None] * made.column_H
    weight_2H = weight_VH.double()
    error_2H, ahead_H = read_2H - weight_2H, weight_2H[0] - weight_2H[1]
    x_H = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(2)).double()
    aside_H = error_2H[1] - error_2H[0]
    x_H += 1.8 * aside_H / aside_H.norm() * (HIDDEN / 2) ** 0.5
    x_H += ahead_H * (0.05 * ahead_H.norm() - x_H @ ahead_H) / (ahead_H @ ahead_H)
    x_NH = x_H[None].bfloat16()
    assert x_NH[0].double() @ ahead_H > 0
    assert x_NH[0].double() @ (read_2H[0] - read_2H[1]) < -1
    [chosen] = bound(screened.screened)(x_NH, weight_VH, screen, batch(1, CPU, greedy=True)).tolist()
    assert chosen == 0


def check_a_token_is_left() -> None:
    """One token is left even if its exact score is above its upper bound, as with activations that have the signs of
    its errors."""
    weight_VH = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    screen = screened.prepare(weight_VH)
    assert screen is not None
    assert screen.is_coarse
    high_VH = torch.cat([screen.codes_2VJ[0] << 4, screen.codes_2VJ[0] & -16], dim=1).double()
    error_VH = weight_VH.double() / screen.column_H - (high_VH + 7.5 - screen.dither_H) * screen.scale_V[:, None]
    x_NH = (error_VH.sign() / screen.column_H).bfloat16()  # powers of two, exact in bfloat16
    assert error_VH.abs().sum() > 1.1 * screened.COARSE_BOUND * screen.scale_V * HIDDEN**0.5
    assert bound(screened.screened)(x_NH, weight_VH, screen, batch(1, CPU, greedy=True)).tolist() == [0]


@pytest.mark.gpu
def test_a_row_of_no_numbers_has_no_token_on_a_gpu() -> None:
    check_no_choice(heads(20_000, 2880)["nothing"].bfloat16().cuda())


def interpret_all() -> None:
    screened.CODED_AT_ONCE = 128
    interpret_choices()
    interpret_ranks()


def test_interpreted_choices() -> None:
    run_gluon(interpret_all)


def test_what_cannot_be_screened_is_chosen_among_all_logits() -> None:
    """A hidden size that is no multiple of 32; the empty batch; more rows than tiles cover."""
    ops = resolve(CPU_TARGET, choose("cpu", {"chooser": "screened"}))
    for num_rows, hidden in ((2, 40), (0, 96), (70, 96)):
        weight_VH, x_NH = torch.randn(50, hidden), torch.randn(num_rows, hidden)
        prepared = ops.chooser.prepare(weight_VH)
        assert (prepared is None) == (hidden == 40)
        chosen_N = ops.chooser.choose(x_NH, weight_VH, prepared, batch(num_rows, CPU, greedy=True))
        assert torch.equal(chosen_N, (x_NH @ weight_VH.T).argmax(1))


@pytest.mark.needs("parallel")
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_ranks_choose_among_few_tokens(num_ranks: int) -> None:
    """Tokens of one rank, of all ranks, and equal ones on two of them."""
    few_KA = torch.tensor([[0, 1, 2, 2, 2], [62, 63, 63, 63, 63], [5, 20, 35, 50, 63], [7, 39, 39, 39, 39]])
    weight_VH, x_KH = torch.randn(64, 40), torch.randn(4, 40)
    weight_VH[39] = weight_VH[7]
    noise_KA = torch.randn(few_KA.shape)
    temperature_K = torch.tensor([1.0, 0.5, 2.0, 0.0])

    def choose_on(own: Communicator) -> Tensor:
        ops = resolve(replace(CPU_TARGET, communicator=own), choose("cpu"))
        return ops.choose_few(x_KH, weight_VH.chunk(num_ranks)[own.rank], few_KA, temperature_K, noise_KA)

    expected_K = choose_few(x_KH, weight_VH, few_KA, temperature_K, noise_KA)
    assert expected_K[3] == 7
    assert all(torch.equal(chosen_K, expected_K) for chosen_K in on_every_rank(num_ranks, choose_on))


def test_large_outliers_switch_off_the_4_bit_screen_then_all_of_it() -> None:
    normal, where = torch.randn(500, 2880), torch.randint(0, 2880, (500, 1))
    prepared = [screened.prepare(weight_VH) for weight_VH in (normal, *(normal.scatter(1, where, x) for x in (8, 80)))]
    assert [None if screen is None else screen.is_coarse for screen in prepared] == [True, False, None]
    for broken in (1e20, torch.inf, torch.nan):
        assert screened.prepare(normal.scatter(1, where[:, :1] * 0, broken)) is None


@pytest.mark.parametrize("hidden", [40, 96])
def test_planned_bytes_are_prepared_bytes(hidden: int) -> None:
    screen = screened.prepare(torch.randn(10, hidden))
    made = [] if screen is None else [getattr(screen, name) for name in screen.__slots__]
    held = sum(part.nbytes for part in made if isinstance(part, Tensor))
    assert screen_bytes(10, hidden) == held


@pytest.mark.compiles
@pytest.mark.parametrize(
    "tile",
    marked(
        (*screen_gemm.COARSE_TILES, *screen_gemm.TILES), newest=[screen_gemm.TILES[-1]], oldest=screen_gemm.COARSE_TILES
    ),
    ids=str,
)
def test_integers_are_multiplied_on_hopper(tile: screen_gemm.Tile) -> None:
    def box(*shape: int) -> str:
        return f"tensordesc<i8[{', '.join(map(str, shape))}],{gl.NVMMASharedLayout(128, 8, len(shape))!r}>"

    kernel = compile_ahead(
        screen_gemm.screen_kernel,
        {
            "high": box(tile.rows, CHUNK_BYTES),
            "low": box(tile.rows, CHUNK_BYTES),
            "planes": box(4 * tile.max_tokens, CHUNK_BYTES),
            "row_scale_ptr": "*fp32",
            "token_scale_ptr": "*fp32",
            "shift_ptr": "*fp32",
            "out_ptr": "*fp32",
            "num_rows": "i32",
            "num_tokens": "i32",
        },
        tile.constants(2880),
        num_warps=tile.warps,
        launch_pdl=True,
    )
    assert kernel.spills == 0
    assert kernel.registers <= 65536 // (32 * tile.warps * tile.programs)
    assert len(re.findall("IGMMA", kernel.sass)) == 8 * max(1, tile.rows * 4 // (64 * tile.warps))  # 32 columns each
    assert "UTMALDG" in kernel.sass
    assert tile.programs * kernel.shared <= 227 * 1024


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("num_ranks", "noise", "part"),
    marked(
        product((1, 2), (False, True), (screened.part_for(1), screened.part_for(64))),
        newest=[(2, True, screened.part_for(64))],
        oldest=[(1, False, screened.part_for(1))],
    ),
)
def test_deciding_fits_the_registers(num_ranks: int, noise: bool, part: int) -> None:
    constants = {"RESTS": screened.COARSE_BOUND, "NOISE": noise, "BLOCK_B": part, "PDL": True}
    constants |= {"BLOCK_H": 4096, "BLOCK_S": 1024}
    first, values = ({"first": "i32"}, {"values": "*fp32"}) if num_ranks > 1 else ({}, {})
    whole = {"first": None} if num_ranks == 1 else {}
    exact = {"x": "*bf16", "weight": "*bf16", "hidden": "i32", "peak": "*fp32", "floor": "*fp32", "arrivals": "*i32"}
    floor = compile_ahead(
        screened.floor_kernel,
        {**SCORES, **DRAWN, **first, **exact, "lower": "*fp32", "likely": "*i32"},
        {**constants, **whole},
        divisible=("hidden",),
        num_warps=4,
        launch_pdl=True,
    )
    decide = compile_ahead(
        screened.decide_kernel,
        {
            **SCORES,
            **DRAWN,
            **first,
            **exact,
            **values,
            "ids": "*i64",
            "best_value": "*fp32",
            "best_id": "*i32",
        },
        {**constants, **whole, **({} if values else {"values": None})},
        divisible=("hidden",),
        num_warps=4,
        launch_pdl=True,
    )
    quantize = compile_ahead(
        screened.quantize_kernel,
        dict.fromkeys(("column", "dither", "scale", "shift", "norm", "rest"), "*fp32")
        | {"x": "*bf16", "planes": "*i8", "hidden": "i32"},
        {"MEAN": 7.5, "TOKENS": 8, "BLOCK_H": 4096, "PDL": True},
        divisible=("hidden",),
        num_warps=8,
        launch_pdl=True,
    )
    for kernel in (quantize, floor, decide):
        assert kernel.spills == 0
        assert kernel.registers <= 160


@pytest.mark.hopper
@pytest.mark.parametrize("num_rows", [1, 3, 8, 9, 17, 33, 64])
@pytest.mark.parametrize("greedy", [True, False])
def test_choices_on_hopper(num_rows: int, greedy: bool) -> None:
    """At the published width; also replayed in a graph, with other activations."""
    for weight_VH in heads(20_011, 2880).values():
        weight_VH = weight_VH.bfloat16().cuda()
        x_NH = activations(num_rows, weight_VH.float()).bfloat16().cuda()
        for coarse in (True, False):
            check_choice(weight_VH, x_NH, batch(num_rows, x_NH.device, greedy=greedy), coarse=coarse)
        check_ranks(weight_VH[:20_000], x_NH, batch(num_rows, x_NH.device, greedy=greedy), 4)
    screen = screened.prepare(weight_VH)
    assert screen is not None
    sampling = batch(num_rows, x_NH.device, greedy=greedy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen_N = bound(screened.screened)(x_NH, weight_VH, screen, sampling)
    for _ in range(3):
        x_NH.normal_()
        graph.replay()
        assert torch.equal(chosen_N, bound(screened.screened)(x_NH, weight_VH, screen, sampling))
        check_choice(weight_VH, x_NH, sampling)
