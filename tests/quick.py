"""`make quick`: a plugin of pytest that leaves out the tests that start a process, and those marked `long`.

A test is found out when it tries: the start is refused, and the test is skipped. So nothing has to be listed. A fixture
that several tests share is refused to all of them. The grammar sandbox is allowed: a worker's tests share one.
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
ALLOWED = "oscine.judges.process"


class ProcessRefused(OSError):  # noqa: N818 - what a test sees where the system has no room for a process
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
    """For what starts processes without an event."""

    def watched(*arguments: Any, **options: Any) -> Any:
        _watch("subprocess.Popen", arguments)
        return start(*arguments, **options)

    return watched


sys.addaudithook(_watch)
multiprocessing.util.spawnv_passfds = _watched(multiprocessing.util.spawnv_passfds)
asyncio.create_subprocess_exec = _watched(asyncio.create_subprocess_exec)  # as uvloop's are


_consequences: list[BaseException] = []  # a fixture of several tests fails for each with the same one


def pytest_configure(config: pytest.Config) -> None:
    """What a test that was broken off has left open says nothing about the next one."""
    for kind in (
        "ResourceWarning",
        "pytest.PytestUnraisableExceptionWarning",
        "pytest.PytestUnhandledThreadExceptionWarning",
    ):
        config.addinivalue_line("filterwarnings", f"ignore::{kind}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in set(long)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    _watch.is_on, _watch.has_refused = True, False
    try:
        return (yield)
    finally:
        _watch.is_on = False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """The failure of a test that was refused a process becomes its being skipped."""
    if call.excinfo is None:
        return
    if _watch.has_refused:
        _consequences.append(call.excinfo.value)
    if isinstance(call.excinfo.value, ProcessRefused) or call.excinfo.value in _consequences:
        try:
            pytest.skip("starts a process")
        except pytest.skip.Exception:
            call.excinfo = pytest.ExceptionInfo.from_current()
