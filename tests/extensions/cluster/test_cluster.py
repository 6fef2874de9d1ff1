"""A real cluster from the command line: models, roles, status, an update, a model that cannot start, the end."""

import json
import os
import stat
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import psutil
import pytest

from tests.api.test_metrics import samples, total
from tests.extensions.cluster.conftest import CommandLine
from tests.waiting import wait_until

QUESTION, ANSWER = "What is 27 + 58?", "85"
KEY = "0123456789abcdef" * 4
FIRST = """
ingress: {port: 0, drain-s: 5}
models:
  - name: [nano, small]
    engine: {kv-cache-bytes: 33554432, max-num-seqs: 4, max-num-batched-tokens: 256}
    prefill: {cpus: 0.25}
    decode: {cpus: 0.25, tensor-parallel-size: 2}
    remote-prefill: {min-tokens: 64, timeout-s: 60}
"""
FAKE = """
  - name: fake
    engine: {executor: fake}
    aggregated: {cpus: 0.25}
"""
BROKEN = """
  - name: broken
    engine: {max-model-len: 131072, kv-cache-bytes: 1000}
    aggregated: {cpus: 0.25}
"""


@pytest.fixture(scope="module")
def cluster(cluster_command: CommandLine) -> CommandLine:
    with pytest.MonkeyPatch.context() as patch:  # later runs of `up` read it from the cluster
        patch.setenv("OSCINE_CLUSTER_KEY", KEY)
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # of a Ray that this cluster has nothing to do with
        done = cluster_command.up(FIRST)
    assert done.returncode == 0, done.stderr
    return cluster_command


@pytest.fixture(scope="module")
def status(cluster: CommandLine) -> dict[str, Any]:
    """As soon as the cluster is up."""
    return cluster.status()


@pytest.fixture(scope="module")
def api(status: dict[str, Any]) -> Iterator[openai.OpenAI]:
    """The same ingress, whatever models come and go."""
    with openai.OpenAI(base_url=f"{status['url']}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(api: openai.OpenAI, model: str) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    answer = api.chat.completions.create(model=model, messages=messages, temperature=0)  # type: ignore[arg-type]
    return answer.choices[0].message.content or ""


def replicas(status: dict[str, Any]) -> dict[str, str]:
    return {replica["replica"]: replica["model"] for replica in status["snapshot"]["replicas"]}


def test_a_model_answers_by_each_of_its_names(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["nano", "small"]
    assert ANSWER in ask(api, "nano")
    assert ask(api, "nano") == ask(api, "small")
    with pytest.raises(openai.NotFoundError):
        ask(api, "other")


def test_other_users_of_the_machine_cannot_reach_ray(cluster: CommandLine) -> None:
    """Ray opens its folder to all users. Its token and its sockets lie below another folder, which stays closed."""
    folder = Path(cluster.ray()["folder"])
    token = folder / "token"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    sockets = [path for path in folder.rglob("*") if path.is_socket()]
    assert len(sockets) >= 2
    if os.geteuid() == 0:
        for path in (token, *sockets):
            found = subprocess.run(["/usr/bin/test", "-e", str(path)], user=65534, group=65534, extra_groups=[])
            assert found.returncode == 1


def status_of_call(port: int, *metadata: tuple[str, str]) -> str:
    """Of a call that has no content, between actors of Ray Serve."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", metadata=metadata, timeout=60)
    return str(raised.value.code().name)  # type: ignore[attr-defined]


def is_of_serve(process: psutil.Process) -> bool:
    return process.cmdline()[0].startswith("ray::Serve")


def test_nothing_of_it_is_open_to_a_network(cluster: CommandLine, api: openai.OpenAI) -> None:
    """Ray Serve's ports between actors listen on all addresses, as no setting says otherwise. They want Ray's token."""
    ask(api, "nano")
    processes = cluster.processes()
    listening = {
        (process.pid, connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(listening) > 5
    on_all = {pid for pid, ip, _ in listening if ip == "::"}
    for pid in on_all:  # while an actor runs a method, Ray names it by that, as ray::f59b693b:decode.check_health
        wait_until(partial(is_of_serve, psutil.Process(pid)), "a process that listens on all addresses is Ray Serve's")
    between = [port for _, ip, port in listening if ip == "::"]
    assert {ip for _, ip, port in listening if port not in between} == {"127.0.0.1"}
    token = Path(cluster.ray()["folder"], "token").read_text()
    for port in between:
        assert status_of_call(port) == "UNAUTHENTICATED"
        assert status_of_call(port, ("authorization", f"Bearer {'0' * len(token)}")) == "UNAUTHENTICATED"
    assert status_of_call(between[0], ("authorization", f"Bearer {token}")) == "UNKNOWN", "the token is right"


def test_the_key_is_shown_nowhere(cluster: CommandLine, status: dict[str, Any]) -> None:
    folder = Path(cluster.ray()["folder"])
    assert KEY not in json.dumps(status)
    assert not any(KEY in argument for process in cluster.processes() for argument in process.cmdline())
    logs = [path for path in folder.rglob("*") if path.is_file() and (path.suffix in {".log", ".out", ".err"})]
    assert logs
    assert not any(KEY in path.read_text(errors="replace") for path in logs)


def test_a_running_cluster_keeps_its_key(cluster: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSCINE_CLUSTER_KEY", "another key, and long enough to be one")
    done = cluster.up(FIRST)
    assert done.returncode == 1
    assert "the cluster runs with another key than OSCINE_CLUSTER_KEY" in done.stderr


def test_status_shows_each_replica(cluster: CommandLine, api: openai.OpenAI) -> None:
    ask(api, "nano")
    done = cluster.run("status")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["oscine-nano: RUNNING", "oscine: RUNNING"]
    rows = [line.split() for line in lines if line.startswith("nano ")]
    assert sorted((row[1], row[4]) for row in rows) == [("decode", "ready"), ("prefill", "ready")]
    assert lines[-1].startswith("ingress: http://127.0.0.1:")


def test_one_scrape_shows_the_whole_cluster(api: openai.OpenAI) -> None:
    ask(api, "nano")
    deadline = time.monotonic() + 60.0
    while True:
        found = samples(httpx.get(str(api.base_url).removesuffix("/v1/") + "/metrics").text)
        if total(found, "oscine:replica_generation_tokens_total", role="decode") > 0:
            break
        assert time.monotonic() < deadline  # replicas report every second
        time.sleep(0.2)
    assert total(found, "oscine:router_up") == 1
    assert total(found, "oscine:replica_state", state="ready", role="prefill") == 1
    assert total(found, "oscine:router_requests_placed_total", model_name="nano") >= 1


def test_updates(cluster: CommandLine, status: dict[str, Any], api: openai.OpenAI) -> None:
    """Another model comes; one that cannot start is told in one line and disturbs nobody; both go."""
    assert cluster.up(FIRST + FAKE).returncode == 0
    assert {model.id for model in api.models.list()} == {"nano", "small", "fake"}
    assert ask(api, "fake")
    failed = cluster.up(FIRST + FAKE + BROKEN)
    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    assert line.startswith("oscine: error: oscine-broken: ")
    assert "Traceback" not in line
    assert ANSWER in ask(api, "nano")
    assert ask(api, "fake")
    assert cluster.up(FIRST).returncode == 0
    with pytest.raises(openai.NotFoundError):
        ask(api, "fake")
    assert replicas(cluster.status()) == replicas(status)  # what did not change went on


def test_down_leaves_nothing(cluster: CommandLine) -> None:
    processes, folder = cluster.processes(), Path(cluster.ray()["folder"])
    assert len(processes) > 5
    assert cluster.run("down").returncode == 0
    assert not any(process.is_running() for process in processes)
    assert not folder.exists()
    assert "no cluster runs" in cluster.run("status").stderr
