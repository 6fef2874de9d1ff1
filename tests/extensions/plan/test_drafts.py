"""Simulated engines with drafts: production's scheduler and policy of drafts, and step times of a table."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from benchmarks.draft_head import Always
from oscine.cli import main
from oscine.engine.core.loop import EngineLoop, Parts
from oscine.engine.core.scheduler import Scheduler
from oscine.extensions.bench.serve.arrival import Arrival
from oscine.extensions.bench.serve.load import Lengths, Shapes
from oscine.extensions.plan.clock.agenda import NS, Clock
from oscine.extensions.plan.engine.drafts import Drafting, Drafts, decode_times
from oscine.extensions.plan.engine.timed import TimedExecutor
from oscine.extensions.plan.engine.tokens import AddressedIndex, tokens
from oscine.extensions.plan.fleet.engines import Way
from oscine.extensions.plan.fleet.simulation import Outcome
from oscine.extensions.plan.traffic.session import Pages
from oscine.extensions.profile.grid import Limits
from oscine.extensions.profile.measure import verified
from oscine.extensions.speculation.policy import SpeculationController
from oscine.kv_group import KVGroup, apart
from oscine.settings.config import EngineOptions, SchedulerOptions, SpeculationOptions
from oscine.timing.answer import Cell
from oscine.timing.features import StepFeatures, pairs_of
from oscine.timing.kinds import NO_GRAPHS
from oscine.timing.read import table_of
from oscine.timing.table import Header, StepPoint, StepTable, write_table
from oscine.types import GenerationRequest, SamplingParams
from tests.extensions.plan.fleets import PAGE, deployment, random_traffic, simulate, times

HEADER = Header("gpt-oss-20b", 24, 2880, "NVIDIA H100", "made up", kv_tokens=200_000, max_num_batched_tokens=2048)
MOST, SIZES, CONTEXTS = 3, (1, 2, 4, 8, 16), (128, 16_384)


def decode_ms(rows: int, context: int) -> float:
    return 2 + rows / 8 + rows * context / 50_000


def points() -> list[StepPoint]:
    """A draft costs a row, and 0.25 ms for the head."""
    found = [
        StepPoint("decode", decode_ms(rows, context), rows, context, sampled=rows)
        for rows in (*SIZES, 32, 64)
        for context in CONTEXTS
    ]
    found += [
        StepPoint(
            "verify",
            decode_ms(n * (1 + k), context) + k / 4,
            n * (1 + k),
            context,
            sampled=n,
            drafts=n * k,
        )
        for n in SIZES
        for k in range(1, 1 + MOST)
        for context in CONTEXTS
    ]
    prompts = [(n, 2 + n / 50) for n in (16, 2048)]
    found += [StepPoint("prompts", ms, tokens=n, pairs=n * n, sequences=1, sampled=1) for n, ms in prompts]
    for rows in (1, 64):
        for n, ms in prompts:
            chosen = rows + 1
            found.append(StepPoint("mixed", 1 + ms, rows, 1024, n, n * n, sequences=1, sampled=chosen))
    return found


TABLE = table_of(HEADER, tuple(points()), scaled=True)


class Noted(StepTable):
    """Remembers the features of the steps that it was asked for, in their order."""

    def __init__(self) -> None:
        self.header, self.points = TABLE.header, TABLE.points
        self.steps: list[StepFeatures] = []

    def cell(self, step: StepFeatures) -> Cell:
        self.steps.append(step)
        return TABLE.cell(step)._replace(last_context=step.decode_context)  # so it is asked for each step


class Run:
    """Requests of 100 tokens that come at once, each with `osl` tokens to generate."""

    def __init__(
        self, acceptance: float, num_drafts: int = MOST, osl: int = 200, *, count: int = 1, overlap: bool = False
    ) -> None:
        self.clock, self.table = Clock(), Noted()
        drafts = Drafts(acceptance, Random(5), has_head=True)
        self.loop = EngineLoop(
            TimedExecutor(self.clock, self.table, drafts),
            EngineOptions(
                scheduler=SchedulerOptions(max_num_seqs=count, max_num_batched_tokens=2048, overlap=overlap),
                speculation=SpeculationOptions("eagle3"),
            ),
            groups=[KVGroup(window, (i,), 1, PAGE, 2, "uint8") for i, window in enumerate([None, 128])],
            memory=apart([count * 400, count * 40]),
            max_model_len=16_384,
            extensions=[lambda loop: Always(num_drafts)],
            parts=Parts(Scheduler, AddressedIndex, self.clock),
        )
        sampling = SamplingParams(osl, temperature=0.0)
        for i in range(count):
            self.loop.add(GenerationRequest(str(i), tokens(100, Pages((), i)), sampling))
        self.outputs: list[tuple[int, int]] = []  # when, and how many tokens
        while self.loop.has_work:
            self.outputs += [(self.clock.ns, len(output.token_ids)) for output in self.loop.step()]
        assert sum(number for _, number in self.outputs) == count * osl

    @property
    def decodes(self) -> list[StepFeatures]:
        return [step for step in self.table.steps if not step.prompt_sequences]


def verifying(start: int, num_drafts: int) -> StepFeatures:
    """Of a sequence that has so many computed tokens."""
    return StepFeatures(1 + num_drafts, pairs_of(start, 1 + num_drafts), sampled=1, drafts=num_drafts)


@pytest.mark.parametrize("num_drafts", [1, MOST])
def test_without_acceptance_each_token_takes_a_step_that_verifies(num_drafts: int) -> None:
    run = Run(0.0, num_drafts)
    assert [number for _, number in run.outputs] == [1] * 200
    gaps_ns = [after - before for (before, _), (after, _) in pairwise(run.outputs)]
    steps = [verifying(100 + i, min(num_drafts, 198 - i)) for i in range(199)]  # the last ones have no room for drafts
    assert gaps_ns == [round(TABLE.step_s(step) / NS) for step in steps]


@pytest.mark.parametrize("num_drafts", [1, MOST])
def test_with_full_acceptance_a_step_has_all_drafts_and_one_token_more(num_drafts: int) -> None:
    run = Run(1.0, num_drafts, osl=1 + 10 * (1 + num_drafts))
    assert [number for _, number in run.outputs] == [1] + [1 + num_drafts] * 10
    assert run.decodes == [verifying(100 + i * (1 + num_drafts), num_drafts) for i in range(10)]


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_read_the_accepted_tokens_that_the_scheduler_does_not_know_yet(overlap: bool) -> None:
    run = Run(0.5, osl=400, overlap=overlap)
    start, accepted = 100, [number for _, number in run.outputs][1:]
    assert len({*accepted}) == 1 + MOST
    for step, number in zip(run.decodes, accepted, strict=True):
        assert step == verifying(start, step.drafts)
        start += number
    if overlap:  # a step was launched before the first token was known, and the head needs one more
        assert [step.drafts for step in run.decodes[:4]] == [0, 0, MOST, MOST]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_mean_number_of_tokens_per_step_is_the_geometric_sum(overlap: bool) -> None:
    share, counters = 0.7, Run(0.7, osl=2000, count=4, overlap=overlap).loop.counters
    shares = [share**i for i in range(1, 1 + MOST)]
    mean = sum(shares)
    variance = sum((2 * i + 1) * probability for i, probability in enumerate(shares)) - mean**2
    assert counters.drafts > 2000
    bound = 4 * (variance / counters.drafts) ** 0.5
    assert counters.accepted_tokens / counters.drafts == pytest.approx(mean, abs=bound)
    for found, expected in zip(counters.accepted_by_position, shares, strict=True):
        assert found / counters.drafts == pytest.approx(expected, abs=0.05)


def test_the_time_per_token_of_a_sequence_is_that_of_the_table() -> None:
    """Of a step at the mean context, by the mean number of tokens of a step."""
    run, osl = Run(0.7, osl=4000), 4000
    (first_ns, _), (last_ns, _) = run.outputs[0], run.outputs[-1]
    tokens_per_step = sum(0.7**i for i in range(1 + MOST))
    expected_s = TABLE.step_s(verifying(100 + osl // 2, MOST)) / tokens_per_step
    assert (last_ns - first_ns) * NS / (osl - 1) == pytest.approx(expected_s, rel=0.02)


# ---- the policy, and fleets ----


@cache
def drafted(way: Way = "jumps", seed: int = 0, acceptance: float = 0.7, method: str = "eagle3") -> Outcome:
    """Two engines with little memory: sequences are preempted."""
    model, specs = deployment(replicas=2, num_pages=(60, 60), max_num_seqs=8)
    spec = specs["aggregated"]
    drafting = Drafting(MOST, decode_times(TABLE, method), method == "eagle3", acceptance, seed)
    options = replace(spec.options, speculation=SpeculationOptions(method))  # type: ignore[arg-type]
    specs["aggregated"] = replace(spec, options=options, table=TABLE, drafting=drafting)
    return simulate(model, specs, random_traffic(Arrival(16), 60, Shapes(Lengths(300, 300, 0.5))), way=way)


def test_drafts_follow_from_the_seed_alone() -> None:
    again = drafted.__wrapped__()
    assert times(drafted()) == times(again) == times(drafted("steps"))
    assert drafted().engines == again.engines
    assert times(drafted(seed=1)) != times(again)


@pytest.mark.parametrize("method", ["eagle3", "ngram"])
def test_preempted_sequences_with_drafts_get_all_their_tokens(method: str) -> None:
    outcome = drafted(method=method)
    total = outcome.total
    lengths = [
        session[0].max_tokens for session in random_traffic(Arrival(16), 60, Shapes(Lengths(300, 300, 0.5))).sessions
    ]
    assert sorted(record.output_tokens for record in outcome.records) == sorted(lengths)
    assert total.generated_tokens == sum(lengths)
    assert total.preemptions > 5
    assert total.full_pages_used == total.active_tokens == total.queued_tokens == 0
    assert total.accepted_tokens / total.drafts > 0.95


def test_the_policy_leaves_drafts_out_that_do_not_pay() -> None:
    """Each engine tries some."""
    none, all_ = drafted(acceptance=0.0).total, drafted(acceptance=1.0).total
    assert 0 < none.draft_tokens < 0.1 * none.generated_tokens
    assert none.accepted_tokens == 0
    assert all_.draft_tokens == all_.accepted_tokens > 0.6 * all_.generated_tokens
    assert drafted(acceptance=1.0).duration_s < drafted().duration_s < drafted(acceptance=0.0).duration_s


def test_the_loop_the_scheduler_and_the_policy_are_those_of_production() -> None:
    _, specs = deployment()
    spec = replace(
        specs["aggregated"],
        options=replace(specs["aggregated"].options, speculation=SpeculationOptions("ngram")),
        drafting=Drafting(MOST, decode_times(TABLE, "ngram"), False, 0.5, 0),
    )
    loop = spec.loop(Clock(), "jumps")
    assert type(loop) is EngineLoop
    assert type(loop._scheduler) is Scheduler
    assert [type(one) for one in loop.extensions] == [SpeculationController]


def test_the_policy_has_the_times_that_an_engine_measured_at_its_start() -> None:
    found = decode_times(TABLE, "ngram")
    assert [*found] == [*SIZES]
    limits = Limits(16, 2048, 16_384, PAGE, (1000, 1000), (None, 128), NO_GRAPHS)
    others = [one for one in points() if one.kind != "verify"]
    for size, one in decode_times(table_of(HEADER, (*others, *verified(found, limits))), "ngram").items():
        assert one.plain == found[size].plain == pytest.approx(decode_ms(size, CONTEXTS[0]) / 1e3)
        assert one.drafting == pytest.approx(found[size].drafting, rel=1e-4)  # points have five digits


# ---- the command ----

FILE = """
models:
  - name: m
    model: openai/gpt-oss-20b
    engine: {max-num-seqs: 16, speculative-config: {method: eagle3, model: head, num_speculative_tokens: 3}}
    aggregated: {gpus: 1, replicas: 2}
"""
PLAIN = FILE.replace(", speculative-config: {method: eagle3, model: head, num_speculative_tokens: 3}", "")
HEADLESS = FILE.replace("model: head, ", "")
LOOKUP = FILE.replace("{method: eagle3, model: head, num_speculative_tokens: 3}", "ngram")
TWO_GPUS = FILE.replace("{gpus: 1", "{gpus: 2, tensor-parallel-size: 2")
LOAD = ("--users", "4", "--isl", "300", "--osl", "50", "--requests", "12")


def simulated(folder: Path, *options: str, text: str = FILE, known: Sequence[StepPoint] = TABLE.points) -> int:
    file, table = folder / "deployment.yaml", folder / "table.jsonl"
    file.write_text(text)
    write_table(table, replace(HEADER, drafts_by="eagle3"), known)
    return main(["simulate", str(file), "--steps", str(table), *options])


def test_the_command_simulates_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rows.jsonl"
    for acceptance in ("0.8", "0.8", "0"):
        assert simulated(tmp_path, *LOAD, "--scaled", "--acceptance", acceptance, "--output", str(output)) == 0
    first, again, never = (json.loads(line) for line in output.read_text().splitlines())
    assert first == again
    assert (first["spec_decoding"], first["acceptance"]) == ("eagle3", 0.8)
    assert first["acceptance_length"] > 2 > never["acceptance_length"] == 1
    assert first["median_tpot"] < 0.7 * never["median_tpot"]
    printed = capsys.readouterr().out
    assert "% accepted; mean acceptance length" in printed
    assert " 0.0% accepted; mean acceptance length 1.00 tokens" in printed


@pytest.mark.parametrize(
    ("options", "text", "kinds", "message"),
    [
        ((), FILE, "decode verify", "--acceptance is needed: the engines have drafts"),
        (("--acceptance", "0.5"), PLAIN, "decode verify", "--acceptance needs engines with speculative-config"),
        (("--acceptance", "1.5"), FILE, "decode verify", "--acceptance: it must be between 0 and 1"),
        (
            ("--acceptance", "0.5"),
            FILE,
            "decode",
            "gpt-oss-20b on NVIDIA H100 have no steps that verify drafts: `oscine",
        ),
        (("--acceptance", "0.5"), HEADLESS, "decode verify", "eagle3 without `model`, the head, is not simulated"),
        (("--acceptance", "0.5"), LOOKUP, "decode verify", "have drafts of eagle3, not of ngram: `oscine profile`"),
        (("--acceptance", "0.5"), TWO_GPUS, "decode verify", "EAGLE-3 head of a model on several GPUs is not"),
    ],
)
def test_an_error_of_drafts_is_one_line(
    tmp_path: Path,
    options: tuple[str, ...],
    text: str,
    kinds: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = [one for one in points() if one.kind in kinds]
    assert simulated(tmp_path, *LOAD, *options, text=text, known=known) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
