"""The planner: laws, planted answers, and the simulator as a second opinion."""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oscine.cli import main
from oscine.extensions.bench.cli.load_options import Sending, Workload
from oscine.extensions.cluster.cli.deployment_file import read_deployment
from oscine.extensions.plan.answer.text import unmet
from oscine.extensions.plan.fleet.engines import table_for
from oscine.extensions.plan.foreign.ops import DATA
from oscine.extensions.plan.search import rounds, trials
from oscine.extensions.plan.search.answer import Answer, FrontPoint, Loss, front
from oscine.extensions.plan.search.deployed import deployment_of
from oscine.extensions.plan.search.estimate import Demand, EngineModel, Estimate
from oscine.extensions.plan.search.goals import Goal, Goals
from oscine.extensions.plan.search.question import Question, Traffic
from oscine.extensions.plan.search.rounds import Found, Judged, search
from oscine.extensions.plan.search.space import Candidate, Layout
from oscine.extensions.plan.search.trials import Trial
from oscine.extensions.plan.sources.gpus import gpu_of, is_hopper
from oscine.extensions.plan.sources.noted import NotedTable
from oscine.extensions.plan.sources.origin import Source
from oscine.extensions.replicas.spec.deployment import Replicas, RoleSpec
from oscine.settings.config import EngineOptions, ModelOptions
from oscine.timing.answer import NotMeasuredError
from oscine.timing.features import StepFeatures, pairs_of
from oscine.timing.table import Header, StepTable
from tests.extensions.plan.fleets import Linear
from tests.extensions.plan.planned import here, write_steps

H200 = gpu_of("H200")
NO_GOALS = Goals()
SMALL = ("--isl", "200", "--osl", "40")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with few requests."""
    monkeypatch.setattr(trials, "processes", here)
    for name in ("_SHORT_TOKENS", "_WHOLE_TOKENS"):
        monkeypatch.setattr(rounds, name, (4000, 9_000_000))
    monkeypatch.setattr(rounds, "_LEAST", 60)


def question_of(count: int, sources: Sequence[Source], goals: Goals = NO_GOALS, users: int = 12) -> Question:
    workload = Workload(isl=200, osl=40)
    return Question("120b", ((H200, count),), Traffic(workload, Sending(), users), goals, tuple(sources), scaled=True)


def searched(question: Question) -> Found:
    with here(lambda count: None) as simulate:
        return search(question, simulate, lambda what, count: None)


# ---- estimates ----


def toy(times: Linear, demand: Demand, max_num_seqs: int = 512) -> EngineModel:
    return EngineModel(StepTable(Header("m", 1, 1, "none", "made up"), times), demand, max_num_seqs, 8192)


def test_users_of_an_engine_with_constant_steps() -> None:
    """Each answer takes a first token of 1.5 steps and so many further steps, whatever the number of users."""
    for users in (1, 10, 300):
        found = toy(Linear(10_000_000), Demand(100, 0, 50, users)).estimate(1)
        assert found.tpot_s == pytest.approx(0.010)
        assert found.tok_s == pytest.approx(users * 50 / (0.015 + 50 * 0.010), rel=0.02)


def test_a_prompt_lengthens_the_steps_of_the_others() -> None:
    """At full load, a request takes its share of decode steps and the time of its prompt: x = n / (m D + n P)."""
    model = toy(Linear(5_000_000, row_ns=100_000, token_ns=20_000), Demand(1000, 0, 100, users=10_000), max_num_seqs=64)
    decode_s, prompt_s = 0.005 + 64 * 0.0001, 1000 * 20e-6
    rate = 64 / (100 * decode_s + 64 * prompt_s)
    found = model.estimate(1)
    assert found.tok_s == pytest.approx(rate * 100, rel=1e-3)
    assert found.tpot_s == pytest.approx(64 / rate / 100, rel=1e-3)
    assert found.ttft_s > (10_000 - 64) / rate * 0.9  # the others wait


def test_a_rate_is_kept_up_to_what_engines_can_do() -> None:
    times = Linear(10_000_000)
    most = 32 / 50 / 0.010  # requests per second of 32 sequences
    for engines in (1, 3):
        for share, is_met in ((0.5, True), (0.9, True), (1.2, False)):
            demand = Demand(10, 0, 50, rate=share * most * engines)
            found = toy(times, demand, max_num_seqs=32).estimate(engines)
            assert (found.ttft_s < 1.0) == is_met
            if is_met:
                assert found.tok_s == pytest.approx(demand.rate * 50)


def test_estimates_are_near_simulations() -> None:
    """Of users that do not go in step: their lengths differ."""
    layout = Layout(H200, Source.of("h200/trtllm"))
    traffic = Traffic(Workload(isl=400, osl=60, spread=0.5), Sending(), users=48)
    question = Question("120b", ((H200, 1),), traffic)
    estimate = EngineModel(NotedTable(layout.source.table("120b", 1, 1)), traffic.demand(), 64, 8192).estimate(1)
    trial = trials.simulate(question.scenario(Candidate(layout, 1, 64, 8192), 600))
    assert trial.row["mean_tpot"] == pytest.approx(estimate.tpot_s, rel=0.15)
    assert trial.tok_s == pytest.approx(estimate.tok_s, rel=0.15)


# ---- the search ----


def test_gpus_are_conserved() -> None:
    question = question_of(6, [Source.of("h200/trtllm")])
    found = searched(question)
    assert {str(one.candidate.layout) for one in found.estimated} >= {"H200 TP1", "H200 TP2", "H200 DP4 EP4"}
    for one in {replace(one.candidate, max_num_seqs=8): one.candidate for one in found.estimated}.values():
        (role,) = deployment_of("120b", one).models[0].roles
        assert role.gpus * role.replicas.min == one.gpus <= 6
        assert len(role.engines) * role.engine.model.tensor_parallel_size == role.gpus
        assert one.engines == role.replicas.min * role.data_parallel_size


@pytest.mark.parametrize(("fast", "best"), [(1, "H200 TP1"), (2, "H200 TP2"), (4, "H200 TP4")])
def test_a_planted_layout_is_found(fast: int, best: str, tmp_path: Path) -> None:
    """Ranks gain nothing, but for one layout, whose steps are ten times as short as one GPU's."""
    files = [write_steps(tmp_path / f"{n}.jsonl", n, 1.0 if n == fast else 10.0) for n in (1, 2, 4)]
    goals = Goals((Goal.of("tpot", "p90:15"),))
    found = searched(question_of(8, [Source.of(str(file)) for file in files], goals))
    assert str(found.finals[0].candidate.layout) == best
    assert found.finals[0].candidate.replicas == 1  # more cost more per token


def test_goals_decide_how_many_replicas(tmp_path: Path) -> None:
    """A step takes 1 ms and 0.5 ms per row: 12 users on r engines have TPOT 1 + 6 / r ms, and a little for prompts."""
    file = write_steps(tmp_path / "1.jsonl", 1, 1.0, row_ms=0.5, token_ms=1e-4)
    for limit_ms, replicas in ((7.5, 1), (2.7, 4)):
        goals = Goals((Goal.of("tpot", f"p50:{limit_ms}"),))
        found = searched(question_of(8, [Source.of(str(file))], goals))
        assert found.finals[0].candidate.replicas == replicas, limit_ms


def test_shipped_profiles_answer_with_what_was_measured_and_others_follow() -> None:
    source = Source.of("h200/oscine")
    for model, ranks in (("120b", 1), ("20b", 1), ("120b", 2)):
        table = source.table(model, ranks, 1)
        kept = [point for point in table.points if not point.held_out]
        steady = [point for point in kept if abs(point.drift or 0.0) < 0.05]  # between the two passes of the profile
        assert len(steady) > 0.9 * len(kept)
        found = [table.step_s(point.features) * 1e3 for point in steady]
        assert found == pytest.approx([point.ms for point in steady], rel=0.05)  # points of equal load become one
        error = re.search(r"kept out of the table: ([\d.]+)%", source.known_error(table))
        assert error is not None
        assert float(error[1]) < 5
        largest = max(point.rows for point in kept if not point.drafts)
        beyond = StepFeatures(2 * largest, 2 * largest * 1024, sampled=2 * largest)
        if ranks == 1:
            assert table.cell(beyond).figures != "measured"
        else:
            with pytest.raises(NotMeasuredError):
                table.cell(beyond)
    assert not source.table("20b", 2, 1).points, "was not measured"
    more_drafts, of_20b = StepFeatures(9, 9 * 1024, sampled=1, drafts=8), StepFeatures(2, 2048, sampled=1, drafts=1)
    for model, step in (("120b", more_drafts), ("20b", of_20b)):
        with pytest.raises(NotMeasuredError, match="drafts"):  # no step of as many rows without drafts
            source.table(model, 1, 1).cell(step)
    assert not source.table("120b", 1, 1, kv="fp8").points


def test_activations_in_fp8_have_a_table_of_their_own_and_nothing_beyond_it() -> None:
    source, prompt = Source.of("h200/oscine"), StepFeatures(0, 0, 2048, pairs_of(0, 2048), 1, 1)
    exact, fp8 = source.table("120b", 1, 1), source.table("120b", 1, 1, activations="fp8")
    assert fp8.header.activation_dtype == "fp8"
    assert fp8.step_s(prompt) < 0.9 * exact.step_s(prompt)
    largest = max(point.rows for point in fp8.points)
    with pytest.raises(NotMeasuredError):
        fp8.cell(StepFeatures(2 * largest, 2 * largest * 1024, sampled=2 * largest))
    with pytest.raises(NotMeasuredError, match=r"activations in fp8 were measured of 20b, 1 x H200, .* in bfloat16"):
        source.table("20b", 1, 1, activations="fp8")


def test_a_plan_with_steps_of_fp8_activations_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps, output = DATA / "steps" / "h200-120b-fp8.jsonl", tmp_path / "plan"
    command = ["plan", "--gpus", "H200:1", "--users", "16", *SMALL, "--steps", str(steps), "--output", str(output)]
    assert main(command) == 0, capsys.readouterr().err
    deployment = read_deployment(output / "deployment.yaml", finds_models=False)
    assert deployment.models[0].serving.engine.model.activation_dtype == "fp8"
    said = re.findall(r"oscine (simulate .*)", capsys.readouterr().out)
    assert main(shlex.split(said[0])) == 0


@pytest.mark.parametrize(
    ("tables", "wanted"),
    [([(1, "auto")], 0), ([(1, "auto"), (2, "fp8")], None), ([(1, "auto"), (2, "auto"), (1, "fp8")], 1)],
)
def test_a_role_gets_the_table_of_its_ranks(tables: list[tuple[int, str]], wanted: int | None) -> None:
    """But where there is only one. `tables`: ranks and activations. The role has two ranks, and exact activations."""
    known = [
        StepTable(Header("m", 1, 1, "g", "s", tensor_parallel_size=n, activation_dtype=a), Linear(1)) for n, a in tables
    ]
    role = RoleSpec("aggregated", EngineOptions(ModelOptions(tensor_parallel_size=2)), Replicas(1, 1))
    if wanted is None:
        with pytest.raises(ValueError, match=r"0 of the tables .* tensor-parallel-size 2 and activation-dtype auto"):
            table_for(role, known)
    else:
        assert table_for(role, known) is known[wanted]


def test_a_file_of_other_activations_is_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_steps(tmp_path / "1.jsonl", 1, 1.0, row_ms=0.5, token_ms=1e-4)
    deployment = tmp_path / "d.yaml"
    deployment.write_text(
        "models:\n- name: m\n  engine: {random-weights: 120b, activation-dtype: fp8}\n  aggregated: {gpus: 1}\n"
    )
    assert main(["simulate", str(deployment), "--steps", str(table), "--users", "1"]) == 2
    assert "tensor-parallel-size 1 and activation-dtype fp8" in capsys.readouterr().err


def test_the_front_is_what_no_other_point_beats() -> None:
    layout = Layout(H200, Source.of("h200/oscine"))
    points = [FrontPoint(layout, i, float(i * 37 % 101), float(i * 53 % 97)) for i in range(60)]

    def is_beaten(one: FrontPoint) -> bool:
        return any(
            other.tok_s_user >= one.tok_s_user and other.tok_s_gpu >= one.tok_s_gpu and other is not one
            for other in points
        )

    assert set(front(points)) == {one for one in points if not is_beaten(one)}


# ---- the command ----


def test_its_figures_are_those_of_oscine_simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the file and the command that it writes. The page has the row of each simulation."""
    output = tmp_path / "plan"
    command = ["plan", "--gpus", "H200:4", "--users", "12", *SMALL, "--spread", "0.3", "--tpot", "p50:8"]
    assert main([*command, "--price", "H200:2", "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert "per million generated tokens" in said
    (written,) = re.findall(r"oscine (simulate .*)", said)
    assert main([*shlex.split(written), "--output", str(tmp_path / "rows.jsonl")]) == 0
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    page = (output / "index.html").read_text("utf-8")
    found = re.findall(r"^.*<pre>(.*)$", page, re.MULTILINE)[0].replace("&quot;", '"')
    planned = json.loads(found)
    assert planned == row
    deployment = read_deployment(output / "deployment.yaml", finds_models=False)
    role = deployment.models[0].serving
    assert f"{role.replicas.min} x H200" in said
    assert re.search(rf"best .* {round(role.gpus * role.replicas.min)} GPUs", said)


def test_drafts_are_estimated_where_steps_verify_them(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = {}
    for acceptance in ("0", "1"):
        assert main(["plan", "--gpus", "H200:1", "--users", "8", *SMALL, "--acceptance", acceptance]) == 0
        said = capsys.readouterr().out
        found = re.search(r"with \d drafts?: ([\d,]+) tokens/s.* estimated alike: ([\d,]+) tokens/s", said)
        assert found is not None, said
        speeds[acceptance] = [int(text.replace(",", "")) for text in found.groups()]
    assert speeds["0"][0] < speeds["0"][1] == speeds["1"][1] < speeds["1"][0]
    assert main(["plan", "--model", "20b", "--gpus", "H200:1", "--users", "8", *SMALL, "--acceptance", "1"]) == 0
    assert "drafts: the step times of this layout have no steps that verify them" in capsys.readouterr().out


def test_a_budget_is_respected(capsys: pytest.CaptureFixture[str]) -> None:
    """11 an hour are three GPUs at 3.50; without goals, as many as possible have the most tokens per second."""
    command = ["plan", "--budget", "11", "--price", "H200:3.5", "--users", "40", *SMALL]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "up to 3 H200" in said
    assert max(map(int, re.findall(r"(\d+) GPUs", said))) <= 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "B200:1"], "TensorRT-LLM's kernels, not Oscine's: none were measured on B200"),
        (["--gpus", "H200:1", "--steps", "h200/vllm"], "vLLM's kernels, not Oscine's: --steps h200/oscine has those"),
        (["--gpus", "H200:1"], ""),
    ],
)
def test_an_answer_with_the_step_times_of_others_says_so_near_the_top(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--users", "4", *SMALL, *options]) == 0
    printed = capsys.readouterr().out
    _, best, third, *_ = printed.splitlines()
    assert best.startswith("best ")
    assert third == (f"{'kernels':<20} step times of {said}" if said else third)
    assert ("kernels," in printed) == bool(said)
    assert ".whl" not in printed
    assert bool(said) == ("composed of times of ops of aisimulate 0.13.0)" in printed)


def test_a_page_that_cannot_be_drawn_is_an_error_before_anything_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(trials, "processes", None)
    command = ["plan", "--gpus", "H200:1", "--users", "4", *SMALL, "--output", str(tmp_path / "plan")]
    assert main(command) == 1
    said = "oscine: error: the page needs matplotlib: pip install 'oscine[bench]'\n"
    assert capsys.readouterr().err == said
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ("--gpus H200:8", 2, ["--users must be given, or --rate or --trace\n"]),
        ("--users 8", 2, ["--gpus must be given, or --budget with --price\n"]),
        ("--gpus X9:8 --users 8", 2, ["--gpus must be", "'X9'", "H100", "H200", "GB200"]),
        ("--gpus H200:8 --price X9:2 --users 8", 2, ["--price must be", "'X9'"]),
        ("--gpus H200 --users 8", 2, ["--gpus must be a GPU and their number"]),
        ("--gpus H200:8 H100:8 --users 8", 2, ["--price"]),
        ("--budget 5 --users 8", 2, ["--price"]),
        ("--budget 1 --price H200:3 --users 8", 2, ["at least 3"]),
        ("--gpus H200:8 --users 8 --tpot fast", 2, ["--tpot must be a statistic", "p90:500"]),
        ("--gpus H200:8 --users 8 --tpot p42:3", 2, ["p99"]),
        ("--gpus H200:8 --users 8 --burst 2", 2, ["--burst needs --rate"]),
        ("--gpus H200:8 --users 8 --steps h200/llama", 2, ["--steps must be a file", "sglang", "not 'h200/llama'"]),
        ("--gpus H200:8 --users 8 --steps h200", 2, ["--steps must be a file", "h200/oscine", "not 'h200'"]),
        ("--gpus H200:8 --users 8 --steps x9/vllm", 2, ["--steps must be of GPUs among H100", "not 'x9'"]),
        ("--gpus H200:1 --users 8 --model mine", 2, ["--model must be 20b or 120b, or", "--steps", "not 'mine'\n"]),
        ("--gpus H200:1 --users 8 --model oscine-nano", 2, ["--model must be 20b or 120b, or", "not 'oscine-nano'\n"]),
        ("--gpus H200:1 --users 8 --price B200:3", 2, ["--price must be of a GPU of --gpus (H200), not 'B200'\n"]),
        ("--gpus H200:1 --users 8 --steps b200/trtllm", 2, ["must have step times of H200; b200/trtllm is of B200\n"]),
        (
            "--gpus H200:1 H100:1 --price H200:3 H100:2 --users 8 --steps h200/oscine",
            2,
            ["--steps must have step times of H100, too\n"],
        ),
        ("--gpus H100:1 --users 8 --gpu-memory 40GiB", 1, ["do not fit", "weights of"]),
        ("--gpus RTX-PRO-6000:1 --users 8 --isl 100000 --osl 100", 1, ["no layout", "--scaled"]),
        ("--gpus H200:1 --users 8 --isl 100 --osl 50 --tpot p50:0.1", 1, ["no plan meets", "nearest", "TPOT p50"]),
        ("--gpus H200:1 --users 8 --isl 500000", 2, ["--isl must be at most 131,072 tokens", "120b, not 500,256\n"]),
        ("--gpus H200:1 --users 8 --osl 140000", 2, ["--isl must be", "together with --osl, for 120b, not 141,024\n"]),
        (
            "--gpus H200:1 --users 8 --shared-prefix 131000",
            2,
            ["--isl must be", "together with --osl and --shared-prefix, for 120b"],
        ),
        ("--gpus H200:1 --users 8 --turns 100000", 2, ["--turns must be at most 102 with these lengths: 120b takes"]),
        ("--gpus H200:2 --rate 500 --isl 200 --osl 40", 1, ["no plan keeps up", "2 x H200 TP1", "of 20,000 tokens/s"]),
        ("--fit --gpus H200:1 --users 8", 2, ["--fit must be given with --validate\n"]),
    ],
)
def test_errors_are_one_line(options: str, status: int, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *options.split()]) == status
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    for word in words:
        assert word in error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "oscine-nano", "layers": 6, "hidden": 256, "gpu": "cpu"},
            "must be of the model 120b (36 layers, hidden size 2880); {} is of oscine-nano (6 layers, hidden size 256)",
        ),
        ({"gpu": "NVIDIA B200"}, "must have step times of H200; {} is of NVIDIA B200"),
        ({"gpu": "NVIDIA GH200 480GB"}, "must have step times of H200; {} is of NVIDIA GH200 480GB"),
    ],
)
def test_a_file_of_another_model_or_gpu_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_steps(tmp_path / "1.jsonl", 1, 1.0)
    header, rest = file.read_text().split("\n", 1)
    file.write_text(f"{json.dumps(json.loads(header) | changes)}\n{rest}")
    assert main(["plan", "--gpus", "H200:1", "--users", "4", *SMALL, "--steps", str(file)]) == 2
    assert capsys.readouterr().err == f"oscine: error: --steps {message.format(file)}\n"


def test_a_file_that_calls_the_model_otherwise_is_taken(tmp_path: Path) -> None:
    file = write_steps(tmp_path / "1.jsonl", 1, 1.0)
    file.write_text(file.read_text().replace('"120b"', '"/models/mine"', 1))
    assert main(["plan", "--gpus", "H200:1", "--users", "4", *SMALL, "--steps", str(file)]) == 0


def test_without_goals_the_nearest_plan_says_what_fails() -> None:
    source = Source.of("h200/trtllm")
    question = question_of(1, [source])
    whole = [Trial({"completed": 9}, (), "measured", 1.0, error) for error in ("", "3 requests failed: too long", "")]
    best = Judged(Candidate(Layout(H200, source), 1, 8, 2048), Estimate(1.0, 1.0, 1.0, 1.0), whole=tuple(whole))
    answer = Answer(
        Found(question, question.traffic.demand()), best, None, "", Loss("", 0, None), (), (), None, None, None
    )
    assert unmet(answer) == "no plan serves the whole load; the nearest is 1 x H200 TP1: 3 requests failed: too long"


def test_names_in_the_driver_are_of_a_kind_of_gpu() -> None:
    for name in ("H100", "H200", "B200", "GB200", "GB300", "RTX-PRO-6000"):
        assert gpu_of(name).is_called(gpu_of(name).driver)
    assert gpu_of("H100").is_called("NVIDIA H100 PCIe")
    assert not gpu_of("B200").is_called("NVIDIA GB200")


def test_the_architecture_of_a_gpu_follows_from_whole_words_of_its_name() -> None:
    assert [gpu_of(name).is_hopper for name in ("H100", "H200", "B200", "GB200", "GB300")] == [True, True, *[False] * 3]
    assert is_hopper("NVIDIA GH200 480GB")
    assert not is_hopper("NVIDIA GB200")
    assert not is_hopper("NVIDIA RTX H2000")
