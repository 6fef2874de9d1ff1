"""An engine with clients besides the one that started it, as a cluster has them."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oscine.engine.process.client import EngineDied
from tests.engine_process.harness import options, read, request, run, running, serving, tokens
from tests.engine_process.test_process import ENDLESS, SLOW_S, until

from .local_placer import guest

GUEST = """
import asyncio, sys
from oscine.types import GenerationRequest, SamplingParams
from oscine.system.owned_folder import make_temporary
from tests.extensions.cluster.local_placer import guest
async def main():
    client = guest(sys.argv[1])
    await client.start()
    await client.wait_ready()
    stream = client.submit(GenerationRequest("guest", [1, 2], SamplingParams(max_tokens=3000)))
    await anext(stream)
    print("running", flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


def test_a_client_that_vanishes_leaves_nothing_behind(folder: Path) -> None:
    async def test() -> None:
        async with serving(options(folder, fake_step_s=SLOW_S)) as client:
            guest = subprocess.Popen([sys.executable, "-c", GUEST, str(client.address)], stdout=subprocess.PIPE)
            assert guest.stdout is not None
            with guest, guest.stdout:
                assert await asyncio.to_thread(guest.stdout.readline) == b"running\n"
                await until(lambda: client.stats.num_running == 1)
                guest.kill()
            await until(lambda: client.stats.num_running == 0)
            assert client.stats.full_pages_used == client.stats.sliding_pages_used == 0
            assert len(tokens(await read(client.submit(request("guest"))))) == 8

    run(test)


def test_two_clients_cannot_use_one_id(folder: Path) -> None:
    async def test() -> None:
        async with (
            serving(options(folder, fake_step_s=SLOW_S)) as owner,
            running(guest(owner.address)) as other,
        ):
            mine = owner.submit(request("same~1", max_tokens=ENDLESS))
            await anext(mine)
            [refused] = await read(other.submit(request("same")))
            assert refused.error == "request id 'same~1' is in use"
            stream = other.submit(request("other", max_tokens=ENDLESS))
            await anext(stream)
            first = owner.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            with pytest.raises(EngineDied):
                await read(stream)
            await until(lambda: owner.pid not in (None, first))  # the other client may notice the death sooner
            await owner.wait_ready()
            assert len(tokens(await read(other.submit(request("again"))))) == 8

    run(test)
