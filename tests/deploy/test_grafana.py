"""Dashboard, autoscaling and alerts query only metrics and labels that a real server has, and by their kinds."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from oscine.api.telemetry.energy import EnergyCollector
from oscine.extensions.replicas.client.dispatcher import MigrationCounters
from oscine.extensions.replicas.client.metrics import ClusterMetrics
from tests.deploy.alerts import rules_of
from tests.deploy.manifests import objects_of, of_kind
from tests.extensions.cluster.test_metrics import Router
from tests.nvml_library import COMPILER, compile_nvml
from tests.server import ServerProcess

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "oscine.json"
TOKEN = re.compile(
    r'\s*(?:(?P<name>[a-zA-Z_:][\w:]*)|(?P<text>"[^"]*")|(?P<range>\[[^\]]*\])|(?P<mark>=~|!~|!=|[^\s\w"]|\d[\d.]*))'
)
NAME = re.compile(r"[a-zA-Z_:][\w:]*")
OVER_TIME = {"rate", "increase"}  # of what is counted alone
COUNTED = {"counter", "histogram", "summary"}
FUNCTIONS = {"sum", "max", "absent", "min_over_time", "histogram_quantile", "label_values", *OVER_TIME}
TARGET_LABELS = {"instance", "job", "namespace"}  # that Prometheus adds
KEY = "sk-dashboard"


def panels() -> Iterator[dict[str, Any]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def expressions() -> list[str]:
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    found += [variable["query"]["query"] for variable in variables if variable["type"] == "query"]
    triggers = of_kind(objects_of("chart-gpus"), "ScaledObject")["spec"]["triggers"]
    found += [trigger["metadata"]["query"] for trigger in triggers]
    return found + [rule["expr"] for rule in rules_of(objects_of("chart-gpus"))]


class Expression:
    """A PromQL expression as far as it names things."""

    def __init__(self, text: str) -> None:
        self.metrics: list[tuple[str, set[str], str]] = []  # name, labels in braces, function right around it
        self.labels: set[str] = set()  # in `by (...)` and `ignoring (...)`
        found = list(TOKEN.finditer(text.strip()))
        assert "".join(match.group() for match in found) == text.strip(), f"not PromQL: {text}"
        self._tokens = [match.group().strip() for match in found]
        self._read()

    def _read(self) -> None:
        open_marks: list[str] = []
        functions: list[str] = []
        i = 0
        while i < len(self._tokens):
            token, following = self._tokens[i], self._tokens[i + 1] if i + 1 < len(self._tokens) else ""
            if token in ("by", "ignoring"):
                end = self._tokens.index(")", i)
                self.labels |= set(self._tokens[i + 2 : end]) - {","}
                i = end
            elif token in FUNCTIONS or (following == "(" and NAME.fullmatch(token)):
                assert token in FUNCTIONS, f"unknown function {token}"
                functions.append(token)
            elif NAME.fullmatch(token):
                i = self._metric(i, functions[-1] if functions and open_marks else "")
            elif token == "(":
                open_marks.append(token)
            elif token == ")":
                open_marks.pop()
                functions = functions[:-1] if len(functions) > len(open_marks) else functions
            i += 1
        assert not open_marks, "a bracket is open"

    def _metric(self, i: int, function: str) -> int:
        labels: set[str] = set()
        name = self._tokens[i]
        if self._tokens[i + 1 : i + 2] == ["{"]:
            end = self._tokens.index("}", i)
            inner = self._tokens[i + 2 : end]
            assert all(inner[j + 1] in ("=", "=~", "!=", "!~") for j in range(0, len(inner), 4)), inner
            labels = set(inner[0::4])
            i = end
        self.metrics.append((name, labels, function))
        return i


@pytest.fixture(scope="module")
def scraped(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, set[str]]]:
    """Sample name -> kind of its family, names of its labels; after an answer and an error. `up` is Prometheus' own."""
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(json.dumps([{"name": "dashboard", "key": KEY}]))
    options = ("--executor", "fake", "--log-level", "error", "--api-keys-file", str(keys), "--kv-offload-bytes=8Mi")
    with ServerProcess(str(model_folder), *options) as server:
        for prompt, status in (("a", 200), ("", 400)):
            answer = httpx.post(
                f"{server.url}/v1/completions", json={"prompt": prompt}, headers={"Authorization": f"Bearer {KEY}"}
            )
            assert answer.status_code == status
        found = server.get("/metrics")
    assert "energy_joules" not in found, "the fake engine uses no GPU"
    energy = energy_metrics(tmp_path_factory.mktemp("nvml")) if COMPILER else ""
    return {"up": ("gauge", set[str]())} | {
        sample.name: (family.type, set(sample.labels))
        for text in (found, cluster_metrics(), energy)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def cluster_metrics() -> str:
    """What an ingress adds to these."""
    registry = CollectorRegistry()
    collector = ClusterMetrics(Router().snapshot, lambda: {"m": MigrationCounters()})
    asyncio.run(collector.refresh())
    registry.register(collector)
    return generate_latest(registry).decode()


def energy_metrics(folder: Path) -> str:
    """What a server with a GPU adds."""
    collector, registry = EnergyCollector(lambda: ["GPU-a"], compile_nvml(folder)), CollectorRegistry()
    asyncio.run(collector.refresh())
    registry.register(collector)
    return generate_latest(registry).decode()


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_names_what_there_is(expression: str, scraped: dict[str, tuple[str, set[str]]]) -> None:
    if "energy_joules" in expression and not COMPILER:
        pytest.skip("there is no C compiler, to make a library of")
    read = Expression(expression)
    if expression.startswith("label_values("):
        (metric, _, _), (label, _, _) = read.metrics
        assert label in scraped[metric][1] | TARGET_LABELS
        return
    assert read.metrics
    known: set[str] = set()
    for name, labels, function in read.metrics:
        assert name in scraped, f"no metric {name}"
        kind, own = scraped[name]
        assert labels <= own | TARGET_LABELS, f"{name} has no {labels - own}"
        assert (function in OVER_TIME) == (kind in COUNTED), f"{function} of {name}, a {kind}"
        known |= own
    assert read.labels <= known | TARGET_LABELS


def test_panels_are_complete_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    ids: list[int] = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
        ids.append(panel["id"])
    assert len(ids) == len(set(ids))
    titles = {panel["title"] for panel in panels()}
    assert {"Time to first token", "Tokens a second", "Pages used", "Sequences", "Errors a second by code"} <= titles
    assert all(target["datasource"]["uid"] == "${datasource}" for panel in panels() for target in panel["targets"])


@pytest.mark.parametrize(
    "wrong",
    ["rate(oscine:x_total[5m]", "sum by (le (rate(a[1m]))", "median(oscine:engine_ready)", 'a{b="c"'],
)
def test_the_reader_of_expressions_notices_nonsense(wrong: str) -> None:
    with pytest.raises((AssertionError, ValueError, IndexError)):
        Expression(wrong)
