"""Published points and their split, the closed loop against arithmetic, and what is fitted."""

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest

from oscine.extensions.plan.foreign.compose import GpuLayout, Rest
from oscine.extensions.plan.foreign.known import FILE, Delays, Fitted, read_fitted, tables_of
from oscine.extensions.plan.validate.closed_loop import ClosedLoop, Load, Server, StepCost
from oscine.extensions.plan.validate.fit import fit, predict
from oscine.extensions.plan.validate.points import Point, of_split, read_points
from oscine.extensions.plan.validate.report import errors_of, lines
from oscine.timing.features import StepFeatures

POINTS = read_points()


def test_a_curve_is_on_one_side() -> None:
    sides = defaultdict(set)
    for point in POINTS:
        sides[point.curve].add(point.split or "queued")
    assert all(len(found - {"queued"}) == 1 or found == {"queued"} for found in sides.values())


def test_each_measurement_counts_once() -> None:
    assert len({(one.hardware, one.framework, one.tpot_ms, one.ttft_ms) for one in POINTS}) == len(POINTS)
    assert len(of_split(POINTS, "held out")) > 150 < len(of_split(POINTS, "train"))


def test_early_files_name_the_product_of_two_sizes() -> None:
    early = {one.layout for one in POINTS if one.version == "gpt-oss-dev"}
    assert GpuLayout(2, 2, 1, 2) in early
    assert all(one.gpus % one.tp == 0 for one in early)


def constant(step_s: float, per_context_s: float = 0.0, cell: int = 1 << 40) -> Callable[[StepFeatures], StepCost]:
    """Steps of equal time, and more per token of context. `cell`: tokens of context up to which a cost is valid."""

    def cost(step: StepFeatures) -> StepCost:
        end = (step.decode_context // cell + 1) * cell - 1
        return StepCost(step_s, per_context_s, end, np.array([1.0]), np.array([0.0]))

    return cost


def test_one_client_sees_the_times_of_its_steps() -> None:
    outcome = ClosedLoop(constant(0.01), Load(1, 100, 50, least=1.0), Server()).run()
    assert outcome.ttft_s == pytest.approx(0.01)
    assert outcome.tpot_s == pytest.approx(0.01)
    assert outcome.tpot_parts.tolist() == pytest.approx([1.0])
    grown = ClosedLoop(constant(0.01, 1e-5), Load(1, 100, 50, least=1.0), Server()).run()
    assert grown.tpot_s == pytest.approx(0.01 + 1e-5 * np.mean(range(101, 150)))


def test_a_prompt_that_exceeds_the_budget_takes_several_steps() -> None:
    load = Load(1, 1000, 10, least=1.0)
    outcome = ClosedLoop(constant(0.01), load, Server(step_tokens=300)).run()
    assert outcome.ttft_s == pytest.approx(0.04)


def test_a_full_cache_lets_requests_wait() -> None:
    load = Load(2, 100, 50, least=1.0)
    outcome = ClosedLoop(constant(0.01), load, Server(kv_tokens=200)).run()
    assert outcome.ttft_s == pytest.approx(0.01 * 51, rel=0.05)


@pytest.mark.parametrize("cell", [1, 7, 1000])
def test_jumps_over_steps_change_nothing(cell: int) -> None:
    load, server = Load(9, 300, 80), Server(step_tokens=128, kv_tokens=2500)
    jumped, stepped = (ClosedLoop(constant(0.01, 1e-6, one), load, server, seed=3).run() for one in (1 << 40, cell))
    assert jumped.tpot_s == pytest.approx(stepped.tpot_s, rel=1e-9)
    assert jumped.ttft_s == pytest.approx(stepped.ttft_s, rel=1e-9)


def test_a_fit_finds_the_servers_that_made_the_points() -> None:
    """Points that are calculated with known constants."""
    known = Fitted(Rest(0.9, 1.2, 8e-4, 5e-6, 0.0, 1e-4, 3e-3), Delays(0.005, 0.001, 5.0, 2e-3, 0.0))
    tables, made = tables_of("h200_sxm", "vllm"), []
    for gpus in (1, 4):
        for prompt, answer in ((1024, 512), (4096, 256)):
            for clients in (4, 32):
                layout = GpuLayout(gpus, gpus, gpus, 1)
                point = Point("h200_sxm", "vllm", "", layout, prompt, answer, clients, 1.0, 1.0, "train")
                tpot_ms, ttft_ms = predict(tables, point, known)
                made.append(point._replace(tpot_ms=tpot_ms, ttft_ms=ttft_ms))
    found = errors_of(made, fit(made, lambda point: tables))
    assert max(map(abs, found.tpot)) < 0.02
    assert max(map(abs, found.ttft)) < 0.06


def test_what_is_stored_was_fitted_to_the_training_half() -> None:
    own = [one for one in of_split(POINTS, "train") if (one.hardware, one.framework) == ("h100_sxm", "vllm")]
    again = fit(own, lambda one: tables_of(one.hardware, one.framework))
    stored = read_fitted(FILE)["h100_sxm", "vllm"]
    assert [*again.rest, *again.delays] == pytest.approx([*stored.rest, *stored.delays], rel=2e-3, abs=1e-9)


def test_curves_that_were_not_fitted_are_met() -> None:
    own = [one for one in of_split(POINTS, "held out") if (one.hardware, one.framework) == ("h200_sxm", "vllm")]
    found = errors_of(own, read_fitted(FILE)["h200_sxm", "vllm"])
    assert found.unanswered == 0
    assert np.mean(np.abs(found.tpot)) < 0.08
    assert np.mean(np.abs(found.ttft)) < 0.25
    _, line, total = lines({("h200_sxm", "vllm"): found})
    assert line.split()[:4] == ["h200_sxm", "vllm", str(len(own)), "0"]
    assert f"{np.mean(np.abs(found.tpot)) * 100:.1f}" in line
    assert total.startswith("all")
