"""Servers that all tests may share. Tests that end or break a server start their own.

The server's packages are imported only when a server is requested: a GPU machine may lack them, and runs the tests of
the kernels.
"""

import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oscine.system.extensions import is_there

if TYPE_CHECKING:
    from tests.server import ServerProcess

# The files that take longest, so that no worker is left alone with one of them in the end; the others follow in order.
LONGEST = (
    "tests/extensions/cluster/test_cluster.py",
    "tests/ops/test_moe_hopper.py",
    "tests/api/test_lifecycle.py",
    "tests/extensions/cluster/test_serve_session.py",  # after the start of the other Ray: Ray gives itself 30 s
    "tests/engine_process/test_process.py",
    "tests/ops/test_attention_gpu.py",
    "tests/conformance/test_description.py",
    "tests/extensions/parallel/test_lost_ranks.py",
    "tests/web/test_playground.py",
    "tests/ops/test_moe_triton.py",
    "tests/extensions/cluster/test_engine.py",
    "tests/extensions/disaggregation/test_disaggregation.py",
    "tests/ops/test_chips.py",
    "tests/chat/test_grammar.py",
    "tests/api/test_chaos.py",
    "tests/extensions/cluster/test_shared_experts.py",
    "tests/extensions/cluster/test_data_parallel.py",
    "tests/api/test_openapi.py",
    "tests/extensions/cluster/test_migrating_answers.py",
    "tests/api/test_structured_output.py",
    "tests/extensions/apis/test_batch.py",
    "tests/ops/test_choose.py",
    "tests/extensions/formats/test_models.py",
    "tests/ops/test_linear_gpu.py",
    "tests/executor/test_cuda.py",
    "tests/extensions/bench/test_serving_command.py",
    "tests/extensions/parallel/test_rank_processes.py",
    "tests/ops/test_native_processors.py",
    "tests/conformance/test_odd_streams.py",
    "tests/extensions/tools/test_python.py",
    "tests/extensions/apis/test_response_stream.py",
    "tests/ops/test_sample_gpu.py",
    "tests/cli/test_commands.py",
    "tests/model/test_nano.py",
    "tests/extensions/tools/test_mcp.py",
    "tests/api/test_recipients.py",
    "tests/executor/test_grammar.py",
    "tests/extensions/bench/test_engine_bench.py",
    "tests/ops/test_norm_gpu.py",
    "tests/executor/test_sampling.py",
    "tests/executor/test_layers_that_differ.py",
    "tests/extensions/parallel/test_failing_ranks.py",
    "tests/executor/test_headers.py",
    "tests/ops/test_native_library.py",
    "tests/extensions/apis/test_responses.py",
    "tests/test_repository.py",
    "tests/extensions/parallel/test_peers.py",
    "tests/api/test_hostile_schemas.py",
    "tests/web/test_appearance.py",
    "tests/executor/test_greedy.py",
    "tests/api/test_tls.py",
    "tests/extensions/disaggregation/test_ranked_transfers.py",
)

gc.disable()  # until all tests are imported: most of what a worker imports lives to its end

STEP_S = 0.002  # of the fake executor: a long answer takes long enough to be interrupted


# Modules that import benchmarks or training, and the extensions that these need
NEEDING = {f"ops/test_{name}.py": "bench" for name in ("moe_fp8", "moe_hopper", "skewed")} | {"training": "tools"}
collect_ignore = [name for name, extension in NEEDING.items() if not is_there(f"oscine.extensions.{extension}")]


def pytest_configure(config: pytest.Config) -> None:
    _mind_interrupts()
    _be_patient()
    _begin_elsewhere(config)


def _mind_interrupts() -> None:
    """Restores SIGINT. Background jobs of a shell ignore it, and the programs that tests start inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# A test with such a parameter needs the extension apis.
PATHS_OF_APIS = ("/v1/responses", "/v1/messages", "/v1/files", "/v1/batches", "/api/", "/v2/", "/invocations")


def _be_patient() -> None:
    """For hypothesis: examples have no deadline and may be slow to make. All examples of a test share its fixtures."""
    with suppress(ImportError):  # a GPU machine may lack it
        from hypothesis import HealthCheck, settings

        checks = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)
        settings.register_profile("patient", deadline=None, suppress_health_check=checks)
        settings.load_profile("patient")


def _begin_elsewhere(config: pytest.Config) -> None:
    """Lets each worker begin to collect in another folder: it finds compiled what others have imported."""
    worker = getattr(config, "workerinput", None)
    if worker is not None and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        tests = Path(__file__).parent
        paths = sorted({str(tests / path.relative_to(tests).parts[0]) for path in tests.rglob("test_*.py")})
        first = int(worker["workerid"].removeprefix("gw")) * len(paths) // worker["workercount"]
        config.args = paths[first:] + paths[:first]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Modules whose imports need an extension that is not there."""
    if collection_path.suffix != ".py":
        return None
    needed = set(re.findall(r"^from (?:oscine|tests)\.extensions\.(\w+)", collection_path.read_text(), re.MULTILINE))
    return any(not is_there(f"oscine.extensions.{name}") for name in needed) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (place.get(item.location[0], len(place)), item.location[0]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = [name for mark in item.iter_markers("needs") for name in mark.args]
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    needed += ["apis" for value in values if isinstance(value, str) and value.startswith(PATHS_OF_APIS)]
    for name in needed:
        if not is_there(f"oscine.extensions.{name}"):
            pytest.skip(f"needs the extension {name}")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What servers keep beyond their end, they keep here and not in the home of who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests speak to this machine alone. Each HTTP client would read the certificates of all authorities, for 40 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("authorities")))
        yield


@pytest.fixture(autouse=True)
def _plain_torch() -> None:
    """The random numbers of a test do not depend on the tests before it."""
    if "torch" in sys.modules:
        from tests.ops.child import compare_plain_tensors

        compare_plain_tensors()
        torch: Any = sys.modules["torch"]
        # torch.manual_seed notes its whole stack for GPUs that may come: half a millisecond, of thousands of tests
        (torch if torch.backends.cuda.is_built() else torch.default_generator).manual_seed(0)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without weights: for scripted and fake engines."""
    from tests.fake_model import write_fake_model

    return write_fake_model(tmp_path_factory.mktemp("fake-model"))


@pytest.fixture(scope="session")
def fake_server(model_folder: Path) -> "Iterator[ServerProcess]":
    """Real HTTP and a real engine process; every answer is the fake executor's reply."""
    from tests.server import ServerProcess

    options = ("--executor", "fake", "--fake-step-s", str(STEP_S), "--date", "2025-08-05", "--log-level", "warning")
    with ServerProcess(str(model_folder), *options) as server:
        yield server


@pytest.fixture(scope="session")
def nano_server() -> "Iterator[ServerProcess]":
    """The embedded model."""
    from tests.server import ServerProcess

    with ServerProcess("--date", "2025-08-05", "--log-level", "warning") as server:
        yield server


@pytest.fixture
def unchecked_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine processes check no messages, so that a token past the vocabulary makes a step fail, as a bug might."""
    code = "from oscine.engine.wire.checks import Checks\nChecks.refusal = lambda self, message: None\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(Path(__file__).parent.parent))))
