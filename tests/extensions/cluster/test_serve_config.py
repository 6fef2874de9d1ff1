"""The applications of a RayService, in a real Ray Serve."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_serve_builds_the_applications_from_a_config_and_keeps_them_when_it_comes_again() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.extensions.cluster.serve_config_session"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    assert json.loads(lines[-1]) == {"answer": "27 + 58 = 85.", "kept": True, "again": "27 + 58 = 85."}
