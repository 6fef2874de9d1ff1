"""`oscine bench engine` with the embedded model, and the arithmetic of its figures with a fake clock."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from oscine.cli import main
from oscine.engine.build import BuiltEngine
from oscine.engine.core.loop import EngineLoop
from oscine.extensions.bench.engine import EngineBench, measured
from oscine.extensions.bench.machine import Machine
from oscine.extensions.bench.passes import MeasureError, OwnEngine
from oscine.extensions.bench.result import Point, results_of
from oscine.extensions.bench.roofline import H200, decode_step_s
from oscine.kv_group import apart
from oscine.model.config import gpt_oss_120b
from oscine.settings.config import Config
from oscine.system.nvml import Energy
from oscine.types import EngineInfo, StepPlan, StepResult
from tests.immediate import Immediate
from tests.nvml_library import JOULES, compile_nvml, needs_compiler

ROOT = Path(__file__).parents[3]


class _StoppedError(Exception):
    def __init__(self, config: Config) -> None:
        self.config = config


KEYS = (
    "model concurrency isl osl output_tok_s prefill_tok_s decode_step_ms tok_s_user roofline_share ready_s gpu torch "
    "triton commit date num_gpus tensor_parallel_size data_parallel_size expert_parallel_size kv_cache_dtype "
    "activation_dtype max_num_seqs max_num_batched_tokens"
)
SERVER_PACKAGES = (
    *("starlette", "uvicorn", "uvloop", "httptools", "httpx", "msgspec", "zmq", "prometheus_client"),
    *("huggingface_hub", "openai_harmony", "matplotlib"),
)


def bench(*arguments: str, absent: tuple[str, ...] = (), cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """In a process of its own, where the packages named are not installed."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r})); "
        f"from oscine.cli import main; sys.exit(main(['bench', *{arguments!r}]))"
    )
    command = [sys.executable, "-c", code]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env=env)


def test_the_embedded_model_without_the_servers_packages(tmp_path: Path) -> None:
    """So many tokens that no hiccup of a busy machine makes the pass of one token the longer one."""
    arguments = ("engine", "--model", "oscine-nano", "--device", "cpu", "--points", "2:16:64", "1:9:48")
    done = bench(*arguments, "--commit", "abc", absent=SERVER_PACKAGES, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    output = tmp_path / results_of("cpu")
    assert str(results_of("cpu")) in done.stdout.splitlines()[0]
    first, second = (json.loads(line) for line in output.read_text().splitlines())
    assert list(first) == KEYS.split()
    assert (first["model"], first["concurrency"], first["isl"], first["osl"]) == ("oscine-nano", 2, 16, 64)
    assert (second["concurrency"], second["isl"], second["osl"]) == (1, 9, 48)
    assert (first["gpu"], first["commit"], first["roofline_share"]) == ("cpu", "abc", None)
    assert 0 < first["ready_s"] < 100
    for result in (first, second):
        assert min(result[key] for key in ("output_tok_s", "prefill_tok_s", "decode_step_ms", "tok_s_user")) > 0
        assert result["tok_s_user"] == pytest.approx(1e3 / result["decode_step_ms"], rel=1e-2)
    assert len(done.stdout.splitlines()) == 4  # machine, header, two points


@pytest.mark.slow
def test_the_embedded_model_on_two_ranks(tmp_path: Path) -> None:
    arguments = ("engine", "--device", "cpu", "--tensor-parallel-size", "2", "--points", "2:16:64")
    done = bench(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / results_of("cpu")).read_text())
    assert (result["tensor_parallel_size"], result["num_gpus"], result["osl"]) == (2, 1, 64)


@pytest.mark.parametrize(
    "shared", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["shared experts", "replicas"]
)
def test_the_embedded_model_on_two_engines(tmp_path: Path, shared: bool) -> None:
    """Five requests: one engine has three of them, and the other goes on taking part."""
    arguments = ["engine", "--device", "cpu", "--data-parallel-size", "2", "--points", "5:16:48", "1:9:32"]
    done = bench(*arguments, *["--enable-expert-parallel"] * shared, absent=SERVER_PACKAGES, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, (tmp_path / results_of("cpu")).read_text().splitlines())
    sizes = [first[f"{name}_parallel_size"] for name in ("tensor", "data", "expert")]
    assert sizes == [1, 2, 2 if shared else 1]
    assert (first["num_gpus"], first["concurrency"], second["concurrency"]) == (1, 5, 1)
    assert min(first["output_tok_s"], first["prefill_tok_s"], second["decode_step_ms"]) > 0


@pytest.mark.slow
def test_two_engines_end_when_one_cannot_be_loaded(tmp_path: Path) -> None:
    done = bench(
        "engine", "--device", "cuda:98,cuda:99", "--data-parallel-size", "2", "--points", "2:8:8", cwd=tmp_path
    )
    assert done.returncode == 2
    assert "cuda:9" in done.stderr.splitlines()[-1]


def test_engines_end_when_one_is_killed() -> None:
    code = """
        import os, signal, threading
        from oscine.extensions.bench import parallel, passes, result
        from oscine.settings.config import EngineOptions, ModelOptions
        options = EngineOptions(ModelOptions(device="cpu"), quiet=True, num_threads=1)
        engines = parallel.EngineProcesses([options] * 2, share_experts=True)
        pids = [process.pid for process in engines._forks._processes]
        threading.Timer(0.5, os.kill, (pids[1], signal.SIGKILL)).start()
        try:
            engines.run(result.Point(64, 16, 30_000))
        except passes.MeasureError as error:
            print(error)
        print([pid for pid in pids if os.path.exists(f"/proc/{pid}")])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    error, left = done.stdout.splitlines()
    assert error.startswith("engine ")
    assert left == "[]"


@pytest.mark.usefixtures("waiting_policy")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["engine", "--points", "1:2"], "C:ISL:OSL"),
        (["engine", "--points", "1:8:1"], "at least 2"),
        (["engine", "--points", "1:8:8", "--passes", "1"], "--passes"),
        (["engine", "--points", "1:8:8", "--baseline", "/no/such/file"], "/no/such/file"),
        (["engine", "--points", "1:8:8", "--output", "/"], "--output /: no file can be written there: Is a directory"),
        (["engine", "--points", "1:8:8", "--output", "/proc/x"], "--output /proc/x: no file can be written there"),
        (
            ["engine", "--points", "1:8:8", "1:64:200000"],
            "--points 1:64:200000: 200064 tokens are more than the model's context, 131072",
        ),
        (
            ["engine", "--points", "1:60:8", "--max-model-len", "64"],
            "--points 1:60:8: 68 tokens are more than --max-model-len, 64",
        ),
        (["engine", "--points", "1:8:8", "--max-num-batched-tokens", "0"], "--max-num-batched-tokens"),
        (["engine"], "--points"),
        ([], "serve|sweep|engine|ops"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else v,
)
def test_errors_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert said in errors.splitlines()[-1]


STEP_S, TOKEN_S = 0.5, 0.001
POINT = Point(8, 100, 11)


class TimedExecutor(Immediate):
    """A device with a clock of its own: a step takes STEP_S and TOKEN_S a token; the first plan is slow as well."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_steps = 0

    def clock(self) -> float:
        return self.now_s

    def execute(self, plan: StepPlan) -> StepResult:
        self.now_s += STEP_S + TOKEN_S * plan.num_tokens + (100.0 if self.num_steps == 0 else 0.0)
        self.num_steps += 1
        return StepResult(plan.step, [[200002] if s.sample else [] for s in plan.sequences])


def timed_bench(num_full_pages: int = 1000, energy: Energy | None = None) -> tuple[TimedExecutor, EngineBench]:
    executor = TimedExecutor()
    options = measured(Config.of({"max-num-batched-tokens": 800}), [POINT]).engine
    config = gpt_oss_120b()
    groups = config.kv_groups(options.cache.page_size, "bfloat16")
    loop = EngineLoop(executor, options, groups=groups, memory=apart([num_full_pages, 1000]), max_model_len=200)
    seqs, tokens = options.scheduler.max_num_seqs, options.scheduler.max_num_batched_tokens
    engine = BuiltEngine(loop, EngineInfo("120b", 200, config.vocab_size, options.cache.page_size, seqs, tokens))
    own = OwnEngine(engine, executor.clock)
    return executor, EngineBench(own, config, options.cache, 12.34, energy=energy)


def test_the_figures_are_those_of_the_warm_pass() -> None:
    """All prompts are one step, the other ten tokens ten. The token that ends a turn stops no request."""
    _, bench = timed_bench()
    where = Machine("NVIDIA H200", "2.11", "3.6", "abc", "2026-01-01T00:00:00Z")
    (result,) = bench.run([POINT], passes=3, warmup_osl=None, where=where)
    first_s = STEP_S + 800 * TOKEN_S
    step_s = STEP_S + 8 * TOKEN_S
    assert result.prefill_tok_s == pytest.approx(800 / first_s, rel=1e-3)
    assert result.decode_step_ms == pytest.approx(step_s * 1e3, rel=1e-3)
    assert result.tok_s_user == pytest.approx(1 / step_s, abs=0.01)
    assert result.output_tok_s == pytest.approx(88 / (first_s + 10 * step_s), abs=0.1)
    assert result.roofline_share == pytest.approx(decode_step_s(gpt_oss_120b(), 8, 105.5, H200) / step_s, abs=1e-4)
    assert result.ready_s == 12.3
    assert result.first_token_ms is None
    assert (result.max_num_seqs, result.max_num_batched_tokens) == (64, 800)
    assert bench.num_held(POINT) == 64  # the limit; the cache holds 500 of two pages each


def test_the_first_token_of_one_prompt_is_the_median_of_all_passes() -> None:
    """The first pass has a slow step, and so has the third."""
    executor, bench = timed_bench()
    execute = executor.execute

    def sometimes_slow(plan: StepPlan) -> StepResult:
        executor.now_s += 7.0 if executor.num_steps == 12 else 0.0
        return execute(plan)

    executor.execute = sometimes_slow  # type: ignore[method-assign]
    where = Machine("NVIDIA H200", "2.11", "3.6", "abc", "2026-01-01T00:00:00Z")
    (result,) = bench.run([Point(1, 100, 11)], passes=4, warmup_osl=None, where=where)
    assert result.first_token_ms == pytest.approx((STEP_S + 100 * TOKEN_S) * 1e3, abs=1e-3)


@needs_compiler
@pytest.mark.parametrize("one_pass_from", [None, 1])
def test_energy_is_read_around_the_pass_of_all_tokens(tmp_path: Path, one_pass_from: int | None) -> None:
    """Two GPUs use 25 J between two readings."""
    energy = Energy(list(JOULES), compile_nvml(tmp_path))
    executor, bench = timed_bench(energy=energy)
    executor.num_steps = 1  # warm
    where = Machine("NVIDIA H200", "2.11", "3.6", "abc", "2026-01-01T00:00:00Z")
    (result,) = bench.run([POINT], passes=4, warmup_osl=None, one_pass_from=one_pass_from, where=where)
    full_s = POINT.concurrency * POINT.osl / result.output_tok_s
    assert result.joules_per_output_token == pytest.approx(25 / 88, abs=1e-6)
    assert result.watts == pytest.approx(25 / full_s, abs=0.1)
    _, uncounted = timed_bench(energy=Energy(["GPU-a", "GPU-old"], compile_nvml(tmp_path)))
    (result,) = uncounted.run([POINT], passes=2, warmup_osl=None, where=where)
    assert result.joules_per_output_token is None
    assert result.watts is None


def test_points_that_differ_in_osl_only_share_the_pass_of_one_token() -> None:
    executor, bench = timed_bench()
    where = Machine("cpu", "2.11", None, "abc", "2026-01-01T00:00:00Z")
    one, other, again = bench.run([POINT, Point(8, 100, 6), POINT], passes=2, warmup_osl=1, where=where)
    (last,) = bench.run([POINT], passes=2, warmup_osl=0, where=where)
    assert one.prefill_tok_s == other.prefill_tok_s
    assert one.decode_step_ms == pytest.approx(other.decode_step_ms)
    assert one.roofline_share is None
    assert again == last == one
    assert executor.num_steps == (1 + 1 + 11) + (1 + 6) + (1 + 11) + 11


def test_one_pass_tells_the_prompts_apart_by_the_first_tokens() -> None:
    executor, bench = timed_bench()
    where = Machine("cpu", "2.11", None, "abc", "2026-01-01T00:00:00Z")
    executor.num_steps = 1  # warm
    (result,) = bench.run([POINT], passes=2, warmup_osl=None, one_pass_from=8, where=where)
    assert executor.num_steps == 1 + 11
    assert result.decode_step_ms == pytest.approx((STEP_S + 8 * TOKEN_S) * 1e3, rel=0.12)  # steps overlap
    assert result.output_tok_s == pytest.approx(88 / (11 * STEP_S + 880 * TOKEN_S), abs=0.1)


def test_a_load_that_does_not_fit_at_once_is_measured_and_known() -> None:
    """Fifteen pages of 64 tokens hold seven of the eight sequences."""
    executor, bench = timed_bench(num_full_pages=15)
    where = Machine("cpu", "2.11", None, "abc", "2026-01-01T00:00:00Z")
    (result,) = bench.run([POINT], passes=2, warmup_osl=None, where=where)
    assert bench.num_held(POINT) == 7
    assert executor.num_steps == 22 + 2 + 22
    assert result.decode_step_ms == pytest.approx(2 * STEP_S * 1e3 + 8, rel=1e-3)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "--max-num-seqs 1024",
        "--max-num-batched-tokens 2048 --max-model-len 4096",
        "--profile max_throughput --kv-cache-dtype fp8",
        "--data-parallel-size 2 --enable-expert-parallel --gpu-memory-utilization 0.5",
    ],
)
@pytest.mark.usefixtures("waiting_policy")
def test_the_engine_is_that_of_a_server(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the points need, only the prefix cache is off, and no request is refused because many wait."""

    def stop(config: Config, *_: object) -> None:
        raise _StoppedError(config)

    monkeypatch.setattr("oscine.cli.serve.command._with_environment", stop)
    monkeypatch.setattr(EngineBench, "load", stop)
    with pytest.raises(_StoppedError) as served:
        main(["serve", "--random-weights", "120b", *given.split()])
    with pytest.raises(_StoppedError) as benched:
        main(["bench", "engine", "--model", "120b", "--points", "1:3000:10", "4000:1024:1024", *given.split()])
    engine = served.value.config.engine
    scheduler = replace(engine.scheduler, max_waiting=max(engine.scheduler.max_waiting, 4000))
    engine = replace(engine, cache=replace(engine.cache, prefix_caching=False), scheduler=scheduler)
    assert benched.value.config == replace(served.value.config, engine=engine)
    limits = {"--max-num-seqs": "max_num_seqs", "--max-num-batched-tokens": "max_num_batched_tokens"}
    left = () if "profile" in given else tuple(field for name, field in limits.items() if name not in given)
    assert benched.value.config.engine.scheduler.by_memory == left


def test_a_pass_too_short_for_a_step_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still after the pass of one token, which is kept."""
    executor, bench = timed_bench()
    where = Machine("cpu", "2.11", None, "abc", "2026-01-01T00:00:00Z")
    list(bench.run([Point(8, 100, 6)], passes=2, warmup_osl=None, where=where))
    monkeypatch.setattr(executor, "execute", lambda plan: StepResult(plan.step, [[1] for _ in plan.sequences]))
    with pytest.raises(MeasureError, match="more tokens"):
        list(bench.run([POINT], passes=2, warmup_osl=None, where=where))


def test_a_refused_request_is_an_error() -> None:
    _, bench = timed_bench()
    where = Machine("cpu", "2.11", None, "abc", "2026-01-01T00:00:00Z")
    with pytest.raises(MeasureError, match="500 tokens"):
        list(bench.run([Point(1, 500, 2)], passes=2, warmup_osl=None, where=where))
