"""The messages of `up` for an app that does not start, its timeouts, and which of two releases goes or is asked."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.schema import ApplicationStatus

from oscine.extensions.cluster.ray import control
from oscine.extensions.cluster.ray.control import Wait
from oscine.extensions.cluster.ray.local import ClusterError
from oscine.extensions.replicas.spec.deployment import ModelSpec, RoleSpec, front_name
from oscine.extensions.replicas.spec.router_messages import own_version

MODEL = ModelSpec(("m",), (RoleSpec("decode", gpus=2.0, cpus=0.5), RoleSpec("prefill")))


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(control, "time", clock)
    return clock


def app(status: str, message: str = "", **deployments: dict[str, int]) -> Any:
    """As Serve tells it; replicas by state."""
    told = {name: SimpleNamespace(replica_states=states, message="") for name, states in deployments.items()}
    return SimpleNamespace(status=ApplicationStatus(status), message=message, deployments=told)


class Waiting:
    def __init__(self, patience_s: float) -> None:
        self.notes: list[str] = []
        self.wait = Wait("oscine-m", MODEL, patience_s)

    def over(self, app: Any) -> bool:
        return self.wait.over(app, lambda: {"CPU": 1.5, "memory": 1e9}, self.notes.append)


def test_an_app_that_runs(clock: Clock) -> None:
    waiting = Waiting(60.0)
    assert not waiting.over(None)
    assert not waiting.over(app("DEPLOYING", decode={"STARTING": 1}))
    assert waiting.over(app("RUNNING", decode={"RUNNING": 1}))
    assert waiting.notes == ["oscine-m is ready"]


def test_a_long_wait_is_told_once(clock: Clock) -> None:
    waiting = Waiting(600.0)
    stuck = app("DEPLOYING", decode={"STARTING": 2, "STOPPING": 1}, prefill={"RUNNING": 1})
    assert not waiting.over(stuck)
    for _ in range(3):
        clock.now += 11.0
        assert not waiting.over(stuck)
    (note,) = waiting.notes
    takes = "(each takes 0.5 CPU, 2 GPU)"
    assert note == f"oscine-m waits: 2 decode to start {takes}, 1 decode to end; Ray has 1.5 CPU, 0 GPU free"


def test_it_ends_when_nothing_moves_any_more(clock: Clock) -> None:
    waiting = Waiting(60.0)
    for running in range(3):  # replicas come one after the other
        clock.now += 50.0
        assert not waiting.over(app("DEPLOYING", decode={"STARTING": 3 - running, "RUNNING": running}))
    clock.now += 61.0
    with pytest.raises(ClusterError, match=r"oscine-m is not ready after 60 s: 1 decode to start .*0 GPU free"):
        waiting.over(app("DEPLOYING", decode={"STARTING": 1, "RUNNING": 2}))


def test_serve_that_never_begins(clock: Clock) -> None:
    waiting = Waiting(60.0)
    assert not waiting.over(None)
    clock.now += 61.0
    with pytest.raises(ClusterError, match="oscine-m is not ready after 60 s: Serve has not begun"):
        waiting.over(None)


@pytest.mark.parametrize("error", ["oscine.engine.wire.stream.EngineError", "oscine.settings.option.OptionError"])
def test_an_app_that_failed_says_why_in_one_line(clock: Clock, error: str) -> None:
    trace = f"Traceback (most recent call last):\n  ...\n{error}: no such weights\n"
    with pytest.raises(ClusterError, match=r"^oscine-m: no such weights$"):
        Waiting(60.0).over(app("DEPLOY_FAILED", trace))


OWN, OTHER = front_name(own_version()), front_name("0" * 16)


@pytest.mark.parametrize(("there", "beside"), [
    ({}, False),
    ({OWN: "RUNNING", "oscine-m": "RUNNING"}, False),
    ({OTHER: "RUNNING"}, True),
    ({OTHER: "DELETING"}, False),
    ({OWN: "DEPLOYING", OTHER: "RUNNING"}, True),  # an `up` that was ended in the middle
])  # fmt: skip
def test_another_release_that_serves(there: dict[str, str], beside: bool) -> None:
    assert control._serves_beside({OWN}, {name: app(status) for name, status in there.items()}) == beside


class Releases:
    """Serve with the fronts of two releases and a model. The own front does not answer."""

    def __init__(self) -> None:
        self.apps = dict.fromkeys([OTHER, "oscine-m", OWN], app("RUNNING"))
        self.draining: list[str] = []
        self.asked: list[str] = []
        self.there_at_delete: dict[str, set[str]] = {}

    def status(self) -> Any:
        """Apps drain until the second look at them."""
        told = SimpleNamespace(applications=dict(self.apps))
        while self.draining:
            del self.apps[self.draining.pop()]
        return told

    def delete(self, name: str, *, _blocking: bool) -> None:
        assert not _blocking
        self.there_at_delete[name] = set(self.apps)
        self.draining.append(name)

    def get_deployment_handle(self, deployment: str, front: str) -> Any:
        self.asked.append(front)

        def result(timeout_s: float) -> str:
            if front == OWN:
                raise TimeoutError
            return f"{deployment} of {front}"

        return SimpleNamespace(url=SimpleNamespace(remote=lambda: SimpleNamespace(result=result)))


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> Releases:
    releases = Releases()
    monkeypatch.setattr(control, "serve", releases)
    return releases


def test_models_go_when_no_ingress_is_left(releases: Releases) -> None:
    control._take_down(list(releases.apps), lambda note: None)
    assert releases.there_at_delete["oscine-m"] == {"oscine-m"}
    assert not releases.apps


def test_the_other_release_is_asked_where_the_own_one_does_not_answer(releases: Releases) -> None:
    assert control.url() == f"ingress of {OTHER}"
    assert releases.asked == [OWN, OTHER]
