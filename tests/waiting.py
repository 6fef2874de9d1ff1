"""Waits for a condition. The deadline only ends a test that fails: it is far above what a busy machine needs."""

import asyncio
import os
import time
from collections.abc import Callable

PATIENCE = float(os.environ.get("OSCINE_TEST_PATIENCE", "1"))  # times deadlines, for a machine that is emulated
_DEADLINE_S = 60.0
DEADLINE_S = _DEADLINE_S * PATIENCE


def wait_until(
    condition: Callable[[], bool], what: str, deadline_s: float = _DEADLINE_S, *, every_s: float = 0.005
) -> None:
    deadline = time.monotonic() + deadline_s * PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(every_s)


async def until(condition: Callable[[], bool], what: str = "", deadline_s: float = _DEADLINE_S) -> None:
    """Like wait_until, while the event loop runs. Without `what` the caller's line names the condition."""
    deadline = time.monotonic() + deadline_s * PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.001)
