"""The part of the tests of several nodes that is not marked `slow`; `make nodes` runs all of them."""

import subprocess
import sys

import pytest

from tests.nodes.entered import ROOT, refusal


@pytest.mark.timeout(600)
def test_nodes_share_nothing_and_pages_cross_their_network() -> None:
    reason = refusal()
    if reason is not None:
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "-m", "tests.nodes", "-m", "not slow"], cwd=ROOT, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
