"""Each alert of deploy/ fires when it should, and at no other time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.deploy.alerts import CASES, evaluate, promtool, rules_of
from tests.deploy.manifests import kustomize, objects_of, of_kind

needs_kustomize = pytest.mark.skipif(kustomize() is None, reason="there is neither kubectl nor kustomize")
needs_promtool = pytest.mark.skipif(promtool() is None, reason="there is no promtool: make checkers")
MONITORED = pytest.param("overlays/autoscaled", marks=needs_kustomize), "chart-gpus"


@pytest.mark.parametrize("name", MONITORED)
def test_each_alert_has_a_load_that_fires_it(name: str) -> None:
    names = [rule["alert"] for rule in rules_of(objects_of(name))]
    assert sorted(names) == sorted(case.alert for case in CASES)


@needs_promtool
def test_an_alert_fires_at_its_load_and_no_other_does(tmp_path: Path) -> None:
    assert evaluate(objects_of("chart-gpus"), "oscine", tmp_path) == ""


@needs_promtool
@needs_kustomize
@pytest.mark.parametrize("job", ["oscine", "oscine-cluster", "other"])
def test_the_components_alerts_know_both_jobs_and_no_other(job: str, tmp_path: Path) -> None:
    down = [case for case in CASES if case.alert == "OscineServerUnreachable"]
    found = evaluate(objects_of("overlays/autoscaled"), job, tmp_path, down)
    assert ("FAILED" in found) == (job == "other"), found


@needs_promtool
def test_the_evaluation_notices_alerts_that_fire_too_early(tmp_path: Path) -> None:
    early = [replace(case, quiet=case.fires, fires=59) for case in CASES[:3]]
    found = evaluate(objects_of("chart-gpus"), "oscine", tmp_path, early)
    for case in early:
        assert f"alertname: {case.alert}, time: {case.quiet}m" in found


@needs_kustomize
def test_the_chart_has_the_alerts_of_the_component() -> None:
    chart, component = (
        json.dumps(of_kind(objects_of(name), "PrometheusRule")["spec"], sort_keys=True)
        for name in ("chart-gpus", "overlays/autoscaled")
    )
    ours, theirs = r"job=\"oscine\", namespace=\"default\"", r"job=~\"oscine|oscine-cluster\""
    assert chart.count(ours) == component.count(theirs) >= len(CASES)
    assert chart.replace(ours, "") == component.replace(theirs, "")
