"""`make quick` skips what starts a process, and lists as slow only what it ran."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = """
import subprocess
import pytest

@pytest.mark.parametrize("starts", [False, True])
def test_partly(starts):
    if starts:
        subprocess.run(["true"])

@pytest.fixture(scope="module")
def process():
    return subprocess.run(["true"])

@pytest.mark.parametrize("again", [False, True])
def test_with_a_shared_process(process, again):
    pass

def test_that_fails():
    assert False

@pytest.mark.long
def test_that_is_long():
    pass
"""


@pytest.mark.long
def test_cases_that_start_a_process_are_skipped_and_not_listed(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long")
    command = [sys.executable, "-m", "pytest", "-p", "tests.quick", "--durations=0", "--durations-min=1e-9", "-rA"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert "1 failed, 1 passed, 3 skipped, 1 deselected" in done.stdout
    assert done.stdout.count("starts a process") == 1, "the three have one reason"
    listed = re.findall(r"^[\d.]+s call +test_some.py::(\S+)", done.stdout, re.MULTILINE)
    assert sorted(listed) == ["test_partly[False]", "test_that_fails"]
