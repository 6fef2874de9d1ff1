"""The choice of a layout against brute force over simulated machines, and estimates against measurements."""

import random
from dataclasses import dataclass

import pytest

from oscine.extensions.timing.estimates import MARGIN, Candidate, Layout, Load, best_first, estimate
from oscine.extensions.timing.machine import Chip, Group, Link, NotMeasuredError, StepTimes
from oscine.extensions.timing.table import Table, shipped_tables
from oscine.timing.table import Header, StepPoint

HIDDEN, LAYERS, PROMPT, ANSWER = 2880, 36, 512, 64
ROWS, TOKENS = (1, 16, 64, 256, 512, 1024), (512, 8192)
NVLINK = Link("NVLink", 1.66e-6, 3.52e11)
REFERENCE = Chip("reference", 1.0, 1.0)


@dataclass(frozen=True)
class World:
    """A step on n GPUs takes `whole` - `part` + `part` / n, scaled by the chip, plus its messages."""

    whole: dict[int, float]  # seconds of a step, by its rows or tokens
    part: dict[tuple[str, int], float]  # seconds that the GPUs divide, by kind and size

    def step_s(self, size: int, sharing: str, n: int, scale: float, link: Link) -> float:
        part = self.part[sharing, size]
        seconds = (self.whole[size] - part + part / n) * scale
        if n == 1:
            return seconds
        rows = 2 * size * (n - 1) / n if sharing == "tensor" else size * (n - 1)
        return seconds + 2 * LAYERS * (link.latency_s + rows * HIDDEN * 2 / link.bytes_per_s)

    def tables(self) -> list[Table]:
        """Tables of one and two GPUs of another chip, linked by NVLink."""
        return [self._table("tensor", 1), self._table("tensor", 2), self._table("experts", 2)]

    def _table(self, sharing: str, n: int) -> Table:
        ranks, sharers = (n, 1) if sharing == "tensor" else (1, n)
        header = Header(
            *("m", LAYERS, HIDDEN, "reference", "invented"),
            bytes_per_s=1.0,
            flops_per_s=1.0,
            num_gpus=n,
            tensor_parallel_size=ranks,
            expert_parallel_size=sharers,
            link_latency_s=NVLINK.latency_s,
            link_bytes_per_s=NVLINK.bytes_per_s,
        )
        ms = {size: 1e3 * self.step_s(size, sharing, n, 1.0, NVLINK) for size in (*ROWS, *TOKENS)}
        decodes = (StepPoint("decode", ms[rows], rows=rows, context=800) for rows in ROWS)
        prompts = (StepPoint("prompts", ms[tokens], tokens=tokens, pairs=tokens) for tokens in TOKENS)
        return Table(header, (*decodes, *prompts))


def invented(draw: random.Random) -> World:
    """`whole` is by size, so decode steps and prompts have different sizes, except for 512, which is both."""
    whole, slope = {}, draw.uniform(5e-6, 1e-4)
    weights = draw.uniform(1e-3, 2e-2)
    for size in (*ROWS, *TOKENS):
        whole[size] = weights + slope * size
    shares = {"tensor": draw.uniform(0.4, 0.95), "experts": draw.uniform(0.05, 0.6)}
    return World(whole, {(how, size): share * whole[size] for how, share in shares.items() for size in whole})


def layouts(count: int) -> list[Layout]:
    ranks = [size for size in (1, 2, 4, 8) if size <= count]
    return [*(Layout(count // size, size) for size in ranks), Layout(count, shares_experts=True)]


def brute_force(world: World, chip: Chip, link: Link, candidates: list[Candidate], *, alone: bool) -> Layout:
    """Runs every step of every layout, one after the other."""
    speeds = {}
    for layout, sequences, step_tokens in ((one.layout, one.sequences, one.step_tokens) for one in candidates):
        sharing, n = ("experts", layout.engines) if layout.shares_experts else ("tensor", layout.ranks)
        rows = 1 if alone else sequences
        seconds, waiting = 0.0, rows * PROMPT
        while waiting:
            tokens = min(waiting, step_tokens)
            seconds += world.step_s(tokens, sharing, n, 1 / chip.flops_per_s, link)
            waiting -= tokens
        for _ in range(ANSWER):
            seconds += world.step_s(rows, sharing, n, 1 / chip.bytes_per_s, link)
        speeds[layout] = rows * ANSWER / seconds * (1 if alone else layout.engines)
    near = [layout for layout, speed in speeds.items() if speed >= (1 - MARGIN) * max(speeds.values())]
    fewest = min(layout.engines if layout.shares_experts else layout.ranks for layout in near)
    return max(
        (one for one in near if (one.engines if one.shares_experts else one.ranks) == fewest),
        key=lambda one: speeds[one],
    )


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("alone", [True, False], ids=["one request", "full caches"])
def test_the_choice_is_that_of_brute_force(count: int, alone: bool) -> None:
    """150 machines with different step times, memories, chips and links. No kind of layout always wins."""
    draw, chosen = random.Random(count), set()
    for _ in range(150):
        world = invented(draw)
        chip = draw.choice([REFERENCE, Chip("other", draw.uniform(0.2, 4), draw.uniform(0.2, 4))])
        link = draw.choice([NVLINK, Link("slow", draw.choice([5e-6, 3e-5]), draw.choice([5e9, 2e10, 1e11]))])
        candidates = [Candidate(layout, draw.choice(ROWS), draw.choice(TOKENS)) for layout in layouts(count)]
        times = StepTimes.of(world.tables(), "m", chip, link)
        [best, *_] = best_first(times, candidates, Load(PROMPT, ANSWER, 1 if alone else None))
        assert best.layout == brute_force(world, chip, link, candidates, alone=alone)
        chosen.add(best.layout)
    assert len(chosen) >= (3 if count > 2 or not alone else 2)


def measured(model: str = "120b", chip: str = "NVIDIA H100 80GB HBM3", link: Link = NVLINK) -> StepTimes:
    [header] = [
        t.header for t in shipped_tables() if (t.header.model, t.header.gpu, t.header.num_gpus) == (model, chip, 1)
    ]
    return StepTimes.of(shipped_tables(), model, Chip(chip, header.bytes_per_s, header.flops_per_s), link)


ALONE, SHARED, RANKS = Layout(2), Layout(2, shares_experts=True), Layout(1, 2)


@pytest.mark.parametrize(
    ("chip", "load", "held", "output_tok_s"),
    [
        # Two H100, with memory for this many sequences each.
        ("NVIDIA H100 80GB HBM3", (1024, 512, 1024), {SHARED: 512, RANKS: 1024}, {SHARED: 20448, RANKS: 20500}),
        ("NVIDIA H100 80GB HBM3", (1024, 512, 64), {SHARED: 512, RANKS: 1024}, {SHARED: 5368, RANKS: 5504}),
        # One H100, which gave no point of this size.
        ("NVIDIA H100 80GB HBM3", (1024, 512, 256), {Layout(1): 240}, {Layout(1): 6436}),
        # Two H200 in one run.
        ("NVIDIA H200", (1024, 1024, 256), {ALONE: 512, SHARED: 512}, {ALONE: 11925, SHARED: 14801}),
        ("NVIDIA H200", (1024, 1024, 2048), {ALONE: 1024, SHARED: 1024}, {ALONE: 25709, SHARED: 29481}),
    ],
)
def test_estimates_are_near_what_was_measured(
    chip: str, load: tuple[int, int, int], held: dict[Layout, int], output_tok_s: dict[Layout, float]
) -> None:
    for layout, expected in output_tok_s.items():
        found = estimate(measured(chip=chip), Candidate(layout, held[layout], 8192), Load(*load))
        assert found.output_tok_s == pytest.approx(expected, rel=0.08), layout


def test_long_prompts_and_short_answers_are_faster_on_separate_engines() -> None:
    """64 prompts of 8,192 on two H100: 664 output tokens/s against 613 with shared experts, and 614 on two ranks."""
    candidates = [Candidate(ALONE, 32, 8192), Candidate(SHARED, 80, 4096), Candidate(RANKS, 160, 8192)]
    [best, *_] = best_first(measured(), candidates, Load(8192, 64, 64))
    assert best.layout == ALONE


def test_an_engine_that_holds_few_sequences_loses() -> None:
    """As two H100 with 80 of 1,024 sequences each: 7,050 output tokens/s against 20,448."""
    candidates = [Candidate(ALONE, 80, 8192), Candidate(SHARED, 512, 4096), Candidate(RANKS, 1024, 8192)]
    [best, *_, worst] = best_first(measured(), candidates, Load(1024, 512))
    assert best.layout in (SHARED, RANKS)
    assert worst.layout == ALONE
    assert worst.output_tok_s == pytest.approx(7050, rel=0.05)


def test_within_the_margin_the_more_independent_layout_wins() -> None:
    times = measured("20b", "NVIDIA H200")
    found = best_first(times, [Candidate(SHARED, 1024, 8192), Candidate(ALONE, 1024, 8192)], Load(1024, 1024))
    assert found[0].layout == ALONE
    assert found[1].output_tok_s > found[0].output_tok_s > (1 - MARGIN) * found[1].output_tok_s


@pytest.mark.parametrize(
    ("load", "tok_s"),  # measured on two H100 with --profile max_throughput
    [
        (Load(1024, 512, 64), {SHARED: 5408, RANKS: 5503, ALONE: 4284}),
        (Load(1024, 512, 1024), {SHARED: 20582, RANKS: 20286, ALONE: 11094}),
        (Load(8192, 64, 64), {SHARED: 596, RANKS: 606, ALONE: 670}),
    ],
    ids=str,
)
def test_the_choice_for_a_load_is_as_fast_as_the_best(load: Load, tok_s: dict[Layout, int]) -> None:
    held = {SHARED: 512, RANKS: 1024, ALONE: 206}
    candidates = [Candidate(layout, sequences, 8192) for layout, sequences in held.items()]
    first, *_ = best_first(measured(), candidates, load)
    assert tok_s[first.layout] >= 0.95 * max(tok_s.values())


def test_a_faster_link_and_a_faster_chip_are_never_worse() -> None:
    slow = measured(link=Link("slow", 5e-6, 2e10))
    for group in (Group("tensor", 2), Group("experts", 2), Group("tensor", 8), Group("experts", 8)):
        for rows in (1, 64, 512):
            assert measured().decode_s(group, rows, 1536) < slow.decode_s(group, rows, 1536)
    twice = Chip("other", 2 * 3.352e12, 2 * 1.07e15)
    faster = StepTimes.of(shipped_tables(), "120b", twice, NVLINK)
    assert faster.decode_s(Group(), 64, 1536) < 0.7 * measured().decode_s(Group(), 64, 1536)
    assert faster.prompts_s(Group(), 8192, 1024) < 0.7 * measured().prompts_s(Group(), 8192, 1024)


def test_the_line_says_what_was_measured() -> None:
    assert measured().origin(Group("tensor", 2)) == "step times measured on NVIDIA H100 80GB HBM3"
    assert measured().origin(Group("tensor", 8)) == (
        "step times calculated from those of 2 GPUs on NVIDIA H100 80GB HBM3"
    )
    other = StepTimes.of(shipped_tables(), "120b", Chip("NVIDIA B200", 8e12, 2.3e15), NVLINK)
    assert other.origin(Group()) == "step times measured and scaled from NVIDIA H200"
    assert measured("20b", "NVIDIA H200").origin(Group("experts", 2)) == "step times calculated on NVIDIA H200"


def test_layouts_without_step_times_are_left_out() -> None:
    with pytest.raises(NotMeasuredError, match="no step times of 7b"):
        StepTimes.of(shipped_tables(), "7b", REFERENCE, NVLINK)
    [alone, *_] = invented(random.Random(0)).tables()
    times = StepTimes.of([alone], "m", REFERENCE, NVLINK)
    candidates = [Candidate(RANKS, 16, 8192), Candidate(ALONE, 16, 8192)]
    assert [one.layout for one in best_first(times, candidates, Load(PROMPT, ANSWER))] == [ALONE]
    assert best_first(times, candidates[:1], Load(PROMPT, ANSWER)) == []


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(1, 2), "1 engine of 2 GPUs"),
        (Layout(2), "2 engines of one GPU each"),
        (Layout(2, 4), "2 engines of 4 GPUs each"),
        (Layout(4, shares_experts=True), "4 engines of one GPU each that share their experts"),
    ],
)
def test_layouts_have_names(layout: Layout, name: str) -> None:
    assert str(layout) == name
