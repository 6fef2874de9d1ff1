"""Loads that fire each alert, for `promtool test rules`, which evaluates the rules of deploy/ over them.

Two pods are healthy for half an hour, and then something changes. Of all alerts exactly one fires.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.manifests import CHECKERS, Objects, of_kind

MINUTES, CHANGE = 60, 30  # a sample per minute; the minute of the change
PODS = ("a", "b")
Values = Sequence[float]


def flat(value: float) -> Values:
    return [value] * (MINUTES + 1)


def growing(per_minute: float) -> Values:
    return [per_minute * minute for minute in range(MINUTES + 1)]


def now_and_then(value: float) -> Values:
    return [value if minute % 3 == 0 else 0 for minute in range(MINUTES + 1)]


def then(values: Values, *, at: float | None = None, per_minute: float = 0, once: float = 0) -> Values:
    """`values` to the change. After it they are `at`, or grow by `per_minute` and by `once` in all."""
    before = values[: CHANGE + 1]
    if at is not None:
        return [*before, *[at] * (MINUTES - CHANGE)]
    return [*before, *(before[-1] + once + per_minute * minute for minute in range(1, MINUTES - CHANGE + 1))]


HEALTHY: dict[str, Values] = {
    "up": flat(1),
    'oscine:engine_ready{model_name="m"}': flat(1),
    'oscine:engine_restarts_total{model_name="m"}': flat(3),
    'oscine:request_queue_time_seconds_bucket{le="1"}': growing(40),
    'oscine:request_queue_time_seconds_bucket{le="10"}': growing(60),
    'oscine:request_queue_time_seconds_bucket{le="60"}': growing(60),
    'oscine:request_queue_time_seconds_bucket{le="+Inf"}': growing(60),
    'oscine:num_requests_waiting{model_name="m"}': now_and_then(9),
    'oscine:kv_cache_usage_perc{model_name="m"}': flat(0.9),
    'oscine:num_preemptions_total{model_name="m"}': flat(40),
    'oscine:non_finite_logits_total{model_name="m"}': flat(2),
    'oscine:request_errors_total{code="internal_error"}': flat(2),
    'oscine:request_errors_total{code="overloaded"}': growing(6),
    "oscine:event_loop_lag_seconds_count": growing(600),
    'oscine:event_loop_lag_seconds_bucket{le="0.01"}': growing(500),
    'oscine:event_loop_lag_seconds_bucket{le="0.25"}': growing(600),
    "process_cpu_seconds_total": growing(48),
    "oscine:response_store_failures_total": flat(1),
    'oscine:kv_offload_disk_failures_total{model_name="m"}': flat(1),
    "oscine:router_up": flat(1),
    'oscine:router_requests_queued{model_name="m"}': now_and_then(5),
    'oscine:router_requests_refused_total{model_name="m"}': flat(12),
    'oscine:migration_failures_total{model_name="m"}': flat(1),
    'oscine:replica_remote_prefill_failures_total{replica="r"}': flat(5),
    'oscine:replica_remote_prefills_declined_total{replica="r"}': flat(5),
    'oscine:router_event_gaps_total{model_name="m"}': growing(30),
}


@dataclass(frozen=True)
class Case:
    alert: str
    series: str  # one of HEALTHY
    values: Values
    quiet: int  # a minute in which the alert does not fire
    fires: int  # and one in which it does
    labels: dict[str, str] = field(default_factory=dict)  # of the alert; job, namespace and pod are added
    pods: tuple[str, ...] = ("a",)  # those that change
    keeps: tuple[str, ...] = ("job", "namespace", "pod")  # labels of the series that the expression keeps


def _case(alert: str, series: str, quiet: int, fires: int, **options: Any) -> Case:
    """`options`: of `then`, or fields of Case."""
    change = {name: options.pop(name) for name in ("at", "per_minute", "once") if name in options}
    label = dict(re.findall(r'(\w+)="([^"]*)"', series)) if "labels" not in options else options.pop("labels")
    return Case(alert, series, then(HEALTHY[series], **change), quiet, fires, label, **options)


M = '{model_name="m"}'
R = '{replica="r"}'
CASES = (
    _case("OscineServerUnreachable", "up", 34, 36, at=0),
    _case("OscineNoEngine", f"oscine:engine_ready{M}", 34, 37, at=0, pods=PODS, keeps=(), labels={}),
    _case("OscineEngineNotReady", f"oscine:engine_ready{M}", 44, 47, at=0),
    _case("OscineEngineRestarts", f"oscine:engine_restarts_total{M}", 31, 40, per_minute=0.34),
    _case(
        "OscineQueueTime",
        'oscine:request_queue_time_seconds_bucket{le="10"}',
        34,
        42,
        per_minute=50,
        pods=PODS,
        keeps=(),
        labels={},
    ),
    _case("OscineQueueNeverEmpty", f"oscine:num_requests_waiting{M}", 43, 47, at=1),
    _case("OscineKvCacheFull", f"oscine:kv_cache_usage_perc{M}", 39, 42, at=0.99),
    _case("OscinePreemptions", f"oscine:num_preemptions_total{M}", 44, 47, per_minute=2),
    _case("OscineNonFiniteLogits", f"oscine:non_finite_logits_total{M}", 30, 32, once=1),
    _case("OscineInternalErrors", 'oscine:request_errors_total{code="internal_error"}', 30, 32, once=1),
    _case(
        "OscineEventLoopBlocked",
        'oscine:event_loop_lag_seconds_bucket{le="0.25"}',
        30,
        32,
        once=-1,
        per_minute=600,
        labels={},
    ),
    _case("OscineApiProcessBusy", "process_cpu_seconds_total", 42, 48, per_minute=58),
    _case("OscineResponsesNotStored", "oscine:response_store_failures_total", 30, 32, once=1),
    _case("OscineOffloadFailures", f"oscine:kv_offload_disk_failures_total{M}", 30, 32, once=1),
    _case("OscineRouterUnreachable", "oscine:router_up", 31, 33, at=0, pods=PODS, keeps=("job",)),
    _case("OscineRequestsFindNoPlace", f"oscine:router_requests_queued{M}", 35, 39, at=2),
    _case("OscineRequestsRefused", f"oscine:router_requests_refused_total{M}", 31, 34, per_minute=1),
    _case("OscineRequestsLost", f"oscine:migration_failures_total{M}", 30, 32, once=1),
    _case("OscineRemotePrefillFailures", f"oscine:replica_remote_prefill_failures_total{R}", 44, 47, per_minute=1),
    _case("OscineTransfersTooSlow", f"oscine:replica_remote_prefills_declined_total{R}", 44, 47, per_minute=1),
    _case("OscineRouterMissesEvents", f"oscine:router_event_gaps_total{M}", 36, 42, per_minute=90),
)


def promtool() -> str | None:
    """The system's, or that of `make checkers`; None where there is neither."""
    return shutil.which("promtool") or shutil.which("promtool", path=str(CHECKERS))


def rules_of(objects: Objects) -> list[dict[str, Any]]:
    return [rule for group in of_kind(objects, "PrometheusRule")["spec"]["groups"] for rule in group["rules"]]


def _input(case: Case, job: str) -> list[dict[str, str]]:
    found = []
    for pod in PODS:
        target = f'job="{job}",namespace="default",pod="{pod}"'
        for series, healthy in HEALTHY.items():
            name, _, labels = series.rstrip("}").partition("{")
            values = case.values if series == case.series and pod in case.pods else healthy
            inner = ",".join(filter(None, (labels, target)))
            found.append({"series": f"{name}{{{inner}}}", "values": " ".join(f"{value:g}" for value in values)})
    return found


def _expected(case: Case, rule: dict[str, Any], job: str) -> dict[str, Any]:
    target = {"job": job, "namespace": "default", "pod": case.pods[0]}
    labels = case.labels | {name: target[name] for name in case.keeps} | rule["labels"]
    return {"exp_labels": labels, "exp_annotations": rule["annotations"]}


def _test(case: Case, rules: list[dict[str, Any]], job: str) -> dict[str, Any]:
    checks = []
    for minute in (case.quiet, case.fires):
        for rule in rules:
            fires = minute == case.fires and rule["alert"] == case.alert
            alerts = [_expected(case, rule, job)] if fires else []
            checks.append({"eval_time": f"{minute}m", "alertname": rule["alert"], "exp_alerts": alerts})
    return {"name": case.alert, "interval": "1m", "input_series": _input(case, job), "alert_rule_test": checks}


def evaluate(objects: Objects, job: str, folder: Path, cases: Sequence[Case] = CASES) -> str:
    """What promtool finds wrong with the alerts among `objects`, whose server has the label `job`; empty if nothing."""
    program, rules = promtool(), rules_of(objects)
    assert program, "there is no promtool"
    (folder / "rules.yaml").write_text(json.dumps(of_kind(objects, "PrometheusRule")["spec"]))
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [_test(c, rules, job) for c in cases]}
    (folder / "tests.yaml").write_text(json.dumps(tests))
    done = subprocess.run([program, "test", "rules", str(folder / "tests.yaml")], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr
