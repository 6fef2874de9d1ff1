"""An event loop whose clock a test advances, so that a timeout of the server expires when the test says so."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class _Loop(asyncio.SelectorEventLoop):
    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


def run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(main)


def pass_time(seconds: float) -> None:
    """Advances the clock. Timers that are due within this time run next."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    loop.skipped_s += seconds
