"""The compliance tests of OpenResponses against the embedded model: `make openresponses`, which fetches them.

docs/api.md says which fail, and why.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import ServerProcess

ROOT = Path(__file__).parents[2]
FETCHED = ROOT / "runs" / "openresponses"
NUM_TESTS = 17
READS_NO_PICTURES = {"image-input"}
OTHER_NAMES = {
    "streaming-response",
    "websocket-response",
    "websocket-sequential-responses",
    "websocket-continuation",
    "websocket-compact-new-chain",
    "websocket-reconnect-store-false-recovery",
    "websocket-failed-continuation-evicts-cache",
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--log-level", "warning") as server:
        yield server


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A copy of the tests, which use the packages beside them."""
    folder = tmp_path / "suite"
    shutil.copytree(FETCHED / "suite", folder, ignore=shutil.ignore_patterns(".git"))
    (tmp_path / "node_modules").symlink_to(FETCHED / "node_modules")
    return folder


def failed(suite: Path, server: ServerProcess) -> set[str]:
    """The tests that fail."""
    bun = FETCHED / "node_modules" / ".bin" / "bun"
    where = ("--base-url", f"{server.url}/v1", "--api-key", "none", "--model", "oscine-nano", "--json")
    done = subprocess.run(
        [bun, "run", "bin/compliance-test.ts", *where],
        cwd=suite, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    results = json.loads(done.stdout)["results"]
    assert len(results) == NUM_TESTS, done.stderr
    return {result["id"] for result in results if result["status"] != "passed"}


@pytest.mark.node
def test_as_they_are_published(suite: Path, server: ServerProcess) -> None:
    assert failed(suite, server) == READS_NO_PICTURES | OTHER_NAMES


@pytest.mark.node
def test_with_the_names_of_events_that_openai_has(suite: Path, server: ServerProcess) -> None:
    changed = 0
    for path in (suite / "src").rglob("*.ts"):
        text = path.read_text()
        for end in ("delta", "done"):
            text = text.replace(f'"response.reasoning.{end}"', f'"response.reasoning_text.{end}"')
        changed += text != path.read_text()
        path.write_text(text)
    assert changed >= 2, "the tests are others than they were"
    assert failed(suite, server) == READS_NO_PICTURES


def test_the_documentation_names_those_that_fail() -> None:
    said = (ROOT / "docs" / "api.md").read_text()
    assert all(f"`{name}`" in said for name in READS_NO_PICTURES | OTHER_NAMES)
