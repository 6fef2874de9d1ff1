"""`oscine doctor --gpu` without a GPU: its judgement of ops, here those of the CPU, and the file that it writes."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from oscine.extensions.bench import step_inputs
from oscine.extensions.bench.ops_check import Checked, check, choice_of
from oscine.extensions.bench.step_inputs import StepLoad
from oscine.extensions.doctor.gpu import CHECKED, Part, examine, outcome_of, parts
from oscine.model.config import ModelConfig
from oscine.ops.interface import Ops, Routing
from oscine.ops.platforms.table import PLATFORMS, TABLE, choose, resolve
from oscine.ops.target import ActivationDtype, Target
from tests.cli.test_commands import run
from tests.extensions.doctor.test_nim import GIB, H200, facts
from tests.ops.bound import reference_ops

CONFIG = ModelConfig(
    vocab_size=512,
    eos_token_ids=(1,),
    hidden_size=128,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=4,
    num_local_experts=6,
    sliding_window=64,
    layer_types=("sliding_attention", "full_attention") * 2,
)
LOADS = (StepLoad(1, 1, 100), StepLoad(40, 1, 70), StepLoad(2, 20, 90))
OPS = {
    "embed",
    "norm_qkv",
    "attention full",
    "attention window-64",
    "out_proj",
    "norm_route",
    "moe",
    "rms_norm",
    "lm_head",
}


@pytest.fixture(autouse=True)
def few_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed, so pages may stay in a cache."""
    monkeypatch.setattr(step_inputs, "KV_BYTES", 1 << 20)


def judged(ops: Ops, loads: tuple[StepLoad, ...] = LOADS, activations: ActivationDtype = "auto") -> list[Checked]:
    return list(check(CONFIG, torch.device("cpu"), ops, loads=loads, activations=activations))


def test_right_ops_are_found_right() -> None:
    found = judged(reference_ops())
    assert all(checked.is_right for checked in found), [str(checked) for checked in found]
    assert {checked.op for checked in found if checked.load == LOADS[0]} == OPS
    assert {checked.op for checked in found if checked.load == LOADS[1]} == OPS | {"choose", "experts"}


def scaled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, **named: function(*args, **named) * 1.1


@pytest.mark.parametrize("op", ["moe", "attention", "out_proj", "lm_head", "embed"])
def test_a_wrong_op_is_found(op: str) -> None:
    """Those before it are right."""
    right = reference_ops()
    found = judged(replace(right, **{op: scaled(getattr(right, op))}), LOADS[1:2])
    wrong = [checked.op.split()[0] for checked in found if not checked.is_right]
    assert op in wrong
    assert "WRONG" in str(next(checked for checked in found if not checked.is_right))


@pytest.mark.parametrize("factor", [1, 1.1])
def test_experts_with_fp8_activations_are_compared_with_the_same_rounding(factor: float) -> None:
    """All ops after them see the rounding, which is far above the error of bfloat16."""
    target = replace(Target.of(torch.device("cpu")), activation_dtype="fp8")
    ops = resolve(target, choose("cpu"))
    found = judged(replace(ops, moe=lambda *args: ops.moe(*args) * factor), LOADS[1:2], "fp8")
    assert all(checked.is_right for checked in found) == (factor == 1), [str(checked) for checked in found]


def with_other_experts(rows: Callable[[int], slice]) -> Ops:
    """rows: number of a call -> which rows go to other experts than those with the largest logits."""
    right, calls = reference_ops(), count()

    def norm_route(*args: Any) -> tuple[torch.Tensor, torch.Tensor, Routing]:
        x_TH, residual_TH, routing = right.norm_route(*args)
        ids_TK = routing.expert_ids_TK.clone()
        chosen = rows(next(calls))
        ids_TK[chosen] = (ids_TK[chosen] + 1) % CONFIG.num_local_experts
        return x_TH, residual_TH, routing._replace(expert_ids_TK=ids_TK)

    return replace(right, norm_route=norm_route)


def test_a_row_with_other_experts_is_counted_and_not_compared() -> None:
    found = judged(with_other_experts(lambda call: slice(0, 1)), LOADS[1:2])
    assert all(checked.is_right for checked in found), [str(checked) for checked in found]
    assert next(checked for checked in found if checked.op == "experts").error >= 1 / 40


def test_one_row_with_other_experts_is_another_row() -> None:
    found = judged(with_other_experts(lambda call: slice(0, 1 if call < 2 else 0)), LOADS[:1])
    assert all(checked.is_right for checked in found), [str(checked) for checked in found]


@pytest.mark.parametrize("load", LOADS[:2])
def test_other_experts_of_all_rows_are_wrong(load: StepLoad) -> None:
    found = judged(with_other_experts(lambda call: slice(None)), (load,))
    assert "moe" in {checked.op for checked in found if not checked.is_right}


def test_not_a_number_is_wrong() -> None:
    right = reference_ops()
    found = judged(replace(right, lm_head=lambda *args, **named: right.lm_head(*args, **named) * torch.nan), LOADS[:1])
    assert [checked.op for checked in found if not checked.is_right] == ["lm_head"]


def test_a_part_that_fails_or_hangs_costs_only_itself(tmp_path: Path) -> None:
    output, said = tmp_path / "gpu.txt", list[str]()
    of = (
        Part("works", "platform", (), 60),
        Part("fails", "timeit", ("1 +",), 60),
        Part("works again", "platform", ("--terse",), 60),
    )
    outcomes = examine(facts(H200), of, output, said.append)
    assert [outcome.ended for outcome in outcomes] == ["done", "exit status 1", "done"]
    assert [line.partition(":")[0] for line in said] == ["works", "fails", "works again"]
    text = output.read_text()
    assert "NVIDIA H200" in text
    assert "SyntaxError" in text
    assert text.index("summary") < text.index("==== works: done") < text.index("==== works again: done")


CRASHES = "import os; os.abort()"


def test_a_part_that_crashes_runs_again_in_pieces(tmp_path: Path) -> None:
    """A piece that crashes or hangs costs only itself too. A part that found something wrong has said what."""
    pieces = (
        Part("crashing piece", "timeit", ("-n", "1", CRASHES), 60),
        Part("hanging piece", "timeit", ("-n", "1", "-s", "import threading", "threading.Event().wait()"), 0.5),
        Part("right piece", "platform", (), 60),
    )
    of = (
        Part("crashes", "timeit", ("-n", "1", CRASHES), 60, pieces),
        Part("fails", "timeit", ("-n", "1", "1 / 0"), 60, pieces[2:]),
        Part("wrong", "timeit", ("-n", "1", "import os; os._exit(3)"), 60, pieces),
        Part("last", "platform", (), 60, pieces),
    )
    outcomes = examine(facts(H200), of, tmp_path / "gpu.txt", lambda line: None)
    assert [(outcome.part.title, outcome.ended) for outcome in outcomes] == [
        ("crashes", "exit status -6"),
        ("crashing piece", "exit status -6"),
        ("hanging piece", "stopped after 0 s"),
        ("right piece", "done"),
        ("fails", "exit status 1"),
        ("right piece", "done"),
        ("wrong", "exit status 3"),
        ("last", "done"),
    ]


def test_the_checks_of_ops_have_a_piece_for_each_op() -> None:
    whole, _, fp8 = parts(H200)[:3]
    assert {piece.arguments[-1] for piece in whole.pieces} == {op.split()[0] for op in OPS}
    assert [piece.arguments for piece in fp8.pieces] == [("20b", "--activation-dtype", "fp8", "--only", "moe")]


@pytest.mark.parametrize("platform", [platform.name for platform in PLATFORMS])
def test_an_op_alone_is_beside_references(platform: str) -> None:
    backends = choose(platform)
    for op in CHECKED:
        assert choice_of(platform, op) == {**dict.fromkeys(TABLE, "reference"), op: backends[op]}
    assert choice_of(platform, None) == backends
    with pytest.raises(ValueError, match="no op 'fly'"):
        choice_of(platform, "fly")


def test_a_part_that_hangs_is_stopped() -> None:
    hangs = Part("hangs", "timeit", ("-n", "1", "-s", "import threading", "threading.Event().wait()"), 60)
    outcome = outcome_of(hangs, 0.5)
    assert outcome.ended == "stopped after 0 s"
    assert not outcome.succeeded


def test_the_engine_runs_the_larger_model_that_fits() -> None:
    small = replace(H200, total=24 * GIB)
    engines = [next(part for part in parts(gpu) if "engine" in part.arguments) for gpu in (H200, small)]
    assert [engine.title for engine in engines] == [f"engine, {name} with random weights" for name in ("120b", "20b")]
    assert len([point for point in engines[0].arguments if point.count(":") == 2]) == 10


def test_without_a_gpu_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = run("doctor", "--gpu")
    assert done.returncode == 2
    assert "--gpu needs an NVIDIA GPU that nvidia-smi shows" in done.stderr
