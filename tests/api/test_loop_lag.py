"""The lag of the event loop, as measured by the server itself."""

import asyncio
import time

from oscine.api.telemetry.loop_lag import measure_lag
from tests.server import ServerProcess


def test_work_that_keeps_the_loop_is_seen() -> None:
    async def lags() -> list[float]:
        found: list[float] = []
        measuring = asyncio.create_task(measure_lag(found.append))
        while not found:
            await asyncio.sleep(0)
        time.sleep(0.2)
        before = len(found)
        while len(found) == before:
            await asyncio.sleep(0)
        measuring.cancel()
        return found[before:]

    assert max(asyncio.run(lags())) > 0.1


def test_a_server_measures_it(fake_server: ServerProcess) -> None:
    assert fake_server.metric("oscine:event_loop_lag_seconds_count") > 0
