"""A recorded load goes through the same policy as a cluster's, and comes out as steps with reasons."""

from pathlib import Path

import msgspec
import pytest

from oscine.cli import main
from oscine.extensions.cluster.scaling.load_record import Recorder, plans, read_lines
from oscine.extensions.replicas.spec.deployment import Deployment, ModelSpec, Replicas, RoleSpec, ScalingOptions
from oscine.extensions.replicas.spec.snapshot import ClusterSnapshot, ReplicaSnapshot
from oscine.types import EngineStats

CLUSTER = """
models:
  - name: nano
    engine: {max-num-seqs: 8}
    prefill: {replicas: {min: 1, max: 4}}
    decode: {replicas: {min: 0, max: 4}}
    scaling: {down-cooldown-s: 20, idle-s: 40}
"""


def line(time_s: float, role: str, replica: str, **values: float) -> str:
    return msgspec.json.encode({"time_s": time_s, "model": "nano", "role": role, "replica": replica} | values).decode()


def busy_then_idle() -> list[str]:
    """One decode replica with a full house for half a minute; its prefill replica has nothing to do."""
    lines = []
    for second in range(160):
        full = {"running": 8, "waiting": 6, "first_tokens": 1} if second < 30 else {}
        lines += [line(1000 + second, "decode", "d", **full), line(1000 + second, "prefill", "p")]
    return lines


def test_a_plan_says_each_step_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, load = tmp_path / "cluster.yaml", tmp_path / "load.jsonl"
    file.write_text(CLUSTER)
    load.write_text("\n".join(busy_then_idle()))
    assert main(["cluster", "plan", str(file), "--load", str(load)]) == 0
    decode, prefill = capsys.readouterr().out.split("nano, prefill")
    steps = [text for text in decode.splitlines() if "->" in text]
    assert "1 -> 2  8.0 requests run and 6.0 wait, and a replica bears 6.4 (80% of its 8 sequences)" in steps[0]
    assert "1 -> 0  nothing was asked for in 40 s" in steps[-1]
    assert "->" not in prefill
    assert "0.04 replica-hours; the recorded load had 0.04" in prefill


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "line 1: "),
        ('{"time_s": 1, "model": "nano"}', "line 1: role is missing"),
        (line(1, "decode", "d", speed=3), "line 1: 'speed' is nothing that a replica reports"),
        (line(1, "encode", "d"), "line 1: Invalid enum value 'encode'"),
        (line(1, "aggregated", "d"), "the deployment has no aggregated replicas of 'nano'"),
        (line(1, "decode", "d").replace("nano", "mini"), "the deployment has no model 'mini'"),
        ("", "there is no line"),
    ],
)
def test_what_is_no_load_is_refused_in_one_line(
    text: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, load = tmp_path / "cluster.yaml", tmp_path / "load.jsonl"
    file.write_text(CLUSTER)
    load.write_text(text)
    assert main(["cluster", "plan", str(file), "--load", str(load)]) == 2
    told = capsys.readouterr().err
    assert error in told
    assert told.count("\n") == 1


def test_what_the_router_says_becomes_a_load(tmp_path: Path) -> None:
    """Counters of two snapshots become growth; requests at the router are held back by full replicas."""
    recorder, lines = Recorder(), []
    for second in range(20):
        stats = EngineStats(num_running=8, num_waiting=4, first_tokens=2 * second, first_token_s=second)
        replica = ReplicaSnapshot("a", "nano", "aggregated", "node", "ready", stats)
        lines += recorder.take(ClusterSnapshot(50.0 + second, [replica], queued={"nano": 12}))
    lines += recorder.take(ClusterSnapshot(90.0, [], queued={"nano": 3}))
    file = tmp_path / "load.jsonl"
    file.write_text("\n".join(lines))
    read = read_lines(file)
    assert [entry.values["first_tokens"] for entry in read[:3]] == [0.0, 2.0, 2.0]
    assert (read[-1].role, read[-1].replica, read[-1].values) == (None, None, {"queued": 3})

    role = RoleSpec(replicas=Replicas(0, 6))
    (plan,) = plans(read, Deployment((ModelSpec(("nano",), (role,), scaling=ScalingOptions()),)))
    assert plan.first == 1
    assert plan.recorded_s == pytest.approx(25, abs=2)
