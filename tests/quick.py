"""`make quick`: a plugin of pytest that leaves out tests that start a process or compile, and those marked `long`.

No list names these tests. When a test starts a process, the start is refused and the test is skipped. If a shared
fixture starts a process, all its tests are skipped. The grammar sandbox is allowed: the tests of a worker share one.
"""

import asyncio
import multiprocessing.util
import sys
from collections.abc import Callable, Generator
from typing import Any

import pytest

STARTS = {
    "subprocess.Popen",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "pty.spawn",
}  # Python's audit events
ALLOWED = "oscine.system.grammar_sandbox.process"


class ProcessRefused(OSError):  # noqa: N818 - to a test, an error of the operating system
    pass


class _Watch:
    def __init__(self) -> None:
        self.is_on = self.has_refused = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.is_on and event in STARTS and ALLOWED not in str(arguments):
            self.has_refused = True
            raise ProcessRefused("make quick starts no processes")


_watch = _Watch()


def _watched(start: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that starts processes without an audit event."""

    def watched(*arguments: Any, **options: Any) -> Any:
        _watch("subprocess.Popen", arguments)
        return start(*arguments, **options)

    return watched


sys.addaudithook(_watch)
multiprocessing.util.spawnv_passfds = _watched(multiprocessing.util.spawnv_passfds)
asyncio.create_subprocess_exec = _watched(asyncio.create_subprocess_exec)  # uvloop has no event


_consequences: list[BaseException] = []  # a shared fixture fails in each of its tests with the same one


def pytest_configure(config: pytest.Config) -> None:
    """Ignores what a skipped test left open: it would fail the next test."""
    for kind in (
        "ResourceWarning",
        "pytest.PytestUnraisableExceptionWarning",
        "pytest.PytestUnhandledThreadExceptionWarning",
    ):
        config.addinivalue_line("filterwarnings", f"ignore::{kind}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = {item for item in items if item.get_closest_marker("long") or item.get_closest_marker("compiles")}
    config.hook.pytest_deselected(items=[*long])
    items[:] = [item for item in items if item not in long]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    _watch.is_on, _watch.has_refused = True, False
    try:
        return (yield)
    finally:
        _watch.is_on = False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Turns the failure of a test that was refused a process into a skip, which is no slow case."""
    if call.excinfo is None:
        return
    if _watch.has_refused:
        _consequences.append(call.excinfo.value)
    if isinstance(call.excinfo.value, ProcessRefused) or call.excinfo.value in _consequences:
        try:
            pytest.skip("starts a process")
        except pytest.skip.Exception:
            call.excinfo, call.duration = pytest.ExceptionInfo.from_current(), 0.0
