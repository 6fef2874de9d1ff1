"""The router and replicas as actors of a real Ray Serve."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.timeout(2000)
def test_serve_routes_by_prefix_also_after_the_router_was_killed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.extensions.cluster.serve_session"],
        capture_output=True,
        text=True,
        timeout=1900,  # each of its steps has an end of its own, and says so
        check=False,
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    said = json.loads(lines[-1])
    assert said["holders"] == ["tcp://10.0.0.1:1"] * 2, "the actor lives as long as the directory that created it"
    assert said["after_its_end"] == "tcp://10.0.0.3:1", "another one was created, and both ask it"
    assert said["model"] == "oscine-nano"
    assert said["spread"] == 2, "what was just placed counts"
    assert said["pages"][said["first"]] >= 40, "the router that is there now learnt it from the engine"
    assert said["again"] == said["first"]
    assert said["overlap"] == 40 * 16
    assert said["elsewhere"] != said["first"]
    assert said["unknown"] == "the model '?' is not deployed"
    assert said["placed"] == 2
