"""`oscine cluster` without a running cluster, and the format of its status."""

import importlib.util
import json
from pathlib import Path

import pytest

from oscine.cli import main
from oscine.extensions.cluster.cli.command import table
from oscine.extensions.cluster.ray import local
from oscine.extensions.cluster.ray.local import LocalRay
from oscine.extensions.replicas.spec.snapshot import ClusterSnapshot, ReplicaSnapshot, RouterCounters
from oscine.system.owned_folder import Kind, make_temporary
from oscine.types import EngineStats


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def left_of_a_cluster() -> Path:
    """A folder with the mark of a Ray that has ended."""
    folder = make_temporary(Kind("ray", None))
    folder.close()
    return folder.path


@pytest.mark.parametrize("verb", ["status", "down"])
def test_no_cluster_runs(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", verb]) == 1
    assert capsys.readouterr().err.startswith("oscine: error: no cluster runs")


def test_what_an_ended_cluster_left_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "oscine"
    folder.mkdir()
    left = left_of_a_cluster()
    state = {"address": "x:1", "pid": 1, "folder": str(left), "num_cpus": 2}
    (folder / "cluster.json").write_text(json.dumps(state))
    assert main(["cluster", "status"]) == 1
    assert "no cluster runs" in capsys.readouterr().err
    assert not left.exists()


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["cluster", "status"]) == 1
    assert "pip install 'oscine[cluster]'" in capsys.readouterr().err


def test_a_file_with_an_error_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("models:\n  - name: a\n    gpus: 1\n")
    assert main(["cluster", "up", str(file)]) == 2
    assert f"{file}:3: models[0]: unknown key 'gpus'" in capsys.readouterr().err


def test_more_cpus_than_this_machine_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("models: [{name: a, aggregated: {cpus: 3, replicas: 1000}}]")
    assert main(["cluster", "up", str(file)]) == 2
    assert "the replicas ask for 3000 CPUs" in capsys.readouterr().err


def test_more_gpus_than_this_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray counts them; the one that was started for it is ended again."""
    folder = left_of_a_cluster()
    monkeypatch.setattr(local, "start", lambda num_cpus: LocalRay("x:1", 1, str(folder), num_cpus))
    monkeypatch.setattr(LocalRay, "connect", lambda self: None)
    monkeypatch.setattr(local, "num_gpus", lambda: 1.0)
    file = tmp_path / "cluster.yaml"
    file.write_text("models: [{name: a, aggregated: {cpus: 0.1, gpus: 1, replicas: 2}}]")
    assert main(["cluster", "up", str(file)]) == 2
    assert f"{file}: gpus: the replicas ask for 2 GPUs, and this machine has 1" in capsys.readouterr().err
    assert not folder.exists()
    assert not (tmp_path / "oscine" / "cluster.json").exists()


def test_status_is_one_line_for_each_replica() -> None:
    slots = {"kv_slots_used": 50, "kv_slots_total": 100}
    stats = EngineStats(num_running=2, num_waiting=1, **slots, prefix_queries=200, prefix_hits=150)
    busy = ReplicaSnapshot("ab12", "nano", "decode", "10.0.0.1", "ready", stats, tokens_s=123.4)
    idle = ReplicaSnapshot("cd34", "nano", "prefill", "10.0.0.2", "starting", EngineStats())
    counters = RouterCounters("nano", placed=4, refused=1, overlap_tokens=30, known_tokens=120, remote_prefills=2)
    header, *rows, route = table(ClusterSnapshot(0.0, [busy, idle], [counters], {"nano": 7}))
    assert header.split()[:3] == ["MODEL", "ROLE", "REPLICA"]
    assert rows[0].split() == ["nano", "decode", "ab12", "10.0.0.1", "ready", "2", "1", "50%", "75%", "123"]
    assert rows[1].split() == ["nano", "prefill", "cd34", "10.0.0.2", "starting", "0", "0", "0%", "-", "0"]
    assert route == (
        "nano: 4 requests placed, 2 with a prefill replica, 25% of their tokens found in caches; 7 wait, 1 refused"
    )
