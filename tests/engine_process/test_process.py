"""The engine in a process of its own, as a client sees it: normal operation and failures."""

import asyncio
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio

from oscine.engine.build import build_engine
from oscine.engine.core.offline import generate
from oscine.engine.process.client import EngineClient, EngineDied, EngineError, EngineOverloaded
from oscine.engine.process.descriptors import connection_limit
from oscine.engine.process.parent import SOCKETS
from oscine.engine.wire.messages import Failed, Hello, Launch, decode_to_client, encode
from oscine.settings.config import ModelOptions
from oscine.system.owned_folder import make_temporary
from tests.tiny import BYTES
from tests.waiting import until

from .conftest import RETURN
from .harness import PATIENCE_S, options, read, request, run, serving, tokens

pytestmark = pytest.mark.long  # each starts engines

SLOW_S = 0.025
ENDLESS = 3000  # at this pace it outlasts the patience of a test


def test_many_streams_at_once(folder: Path) -> None:
    async def test() -> None:
        async with serving(options(folder)) as client:
            assert client.info is not None
            assert (client.info.model, client.info.vocab_size) == (str(folder), BYTES.vocab_size)
            assert min(client.stats.full_pages_total, client.stats.sliding_pages_total) > 0  # known from the start
            requests = [request(str(i), max_tokens=20 + i) for i in range(20)]
            found = await asyncio.gather(*(read(client.submit(one)) for one in requests))
            for one, outputs in zip(requests, found, strict=True):
                assert {output.request_id for output in outputs} == {one.request_id}
                assert len(tokens(outputs)) == one.sampling.max_tokens
                assert [output.finish_reason for output in outputs[-2:]] == [None, "length"]
            stats = client.stats
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            assert (stats.full_pages_used, stats.sliding_pages_used) == (0, 0)
            assert stats.generated_tokens == sum(one.sampling.max_tokens for one in requests)
        assert client.state == "stopped"

    run(test)


def test_the_scripted_reply_ends_where_its_end_is_a_stop_and_goes_on_where_not(folder: Path) -> None:
    async def test() -> None:
        async with serving(options(folder)) as client:
            whole, endless = await asyncio.gather(
                read(client.submit(request("stop", max_tokens=ENDLESS, stop_token_ids=(RETURN,)))),
                read(client.submit(request("on", max_tokens=1000, logprobs=1))),
            )
            assert whole[-1].finish_reason == "stop"
            assert tokens(whole)[-1] == RETURN
            assert tokens(endless)[: len(tokens(whole)) - 1] == tokens(whole)[:-1]
            assert RETURN not in tokens(endless)
            assert [entry.token_id for output in endless for entry in output.logprobs or []] == tokens(endless)

    run(test)


def test_cancel_and_close_free_everything(folder: Path) -> None:
    async def test() -> None:
        async with serving(options(folder, fake_step_s=SLOW_S)) as client:
            cancelled = client.submit(request("a", max_tokens=ENDLESS))
            await anext(cancelled)
            client.cancel("a")
            outputs = await read(cancelled)
            assert outputs[-1].finish_reason == "cancelled"
            await until(lambda: client.stats.full_pages_used == client.stats.num_running == 0)
            async with client.submit(request("b", max_tokens=ENDLESS)) as closed:
                await anext(closed)
                await until(lambda: client.stats.num_running == 1)
            await until(lambda: client.stats.num_running == 0)
            assert client.stats.full_pages_used == client.stats.sliding_pages_used == 0
            client.cancel("b")
            assert len(tokens(await read(client.submit(request("b"))))) == 8

    run(test)


def test_cancel_does_not_wait_for_a_step_that_is_under_way(folder: Path) -> None:
    async def test() -> None:
        async with serving(options(folder, fake_step_s=SLOW_S)) as client:
            stream = client.submit(request("a", max_tokens=ENDLESS))
            await anext(stream)
            assert client.pid is not None
            engine = psutil.Process(client.pid)
            engine.suspend()
            client.cancel("a")
            outputs = await read(stream)
            engine.resume()
            assert outputs[-1].finish_reason == "cancelled"

    run(test)


def test_one_too_many_is_refused_as_overload_and_a_bad_one_as_an_error(folder: Path) -> None:
    async def test() -> None:
        async with serving(options(folder, fake_step_s=SLOW_S, max_num_seqs=1, max_waiting=1)) as client:
            first = client.submit(request("running", max_tokens=ENDLESS))
            await anext(first)
            waiting, *others = [client.submit(request(str(i))) for i in range(4)]
            with pytest.raises(ValueError, match="'0' is in use"):
                client.submit(request("0"))
            for stream in others:
                with pytest.raises(EngineOverloaded):
                    await read(stream)
            first.close()
            assert len(tokens(await read(waiting))) == 8
            [bad] = await read(client.submit(request("long", [1] * BYTES.max_position_embeddings)))
            assert bad.finish_reason == "error"
            assert "4096 tokens" in str(bad.error)

    run(test)


def test_a_killed_engine_fails_its_requests_at_once_and_comes_back(folder: Path) -> None:
    async def test() -> None:
        async with serving(options(folder, fake_step_s=SLOW_S)) as client:
            first = client.pid
            assert first is not None
            streams = [client.submit(request(str(i), max_tokens=ENDLESS)) for i in range(3)]
            await asyncio.gather(*map(anext, streams))
            os.kill(first, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineDied):
                    await read(stream)
            assert client.state == "restarting"
            with pytest.raises(EngineDied):
                client.submit(request("early"))
            assert client.stats.num_running == 0
            await client.wait_ready()
            assert client.pid != first
            assert client.error is None
            assert len(tokens(await read(client.submit(request("0"))))) == 8

    run(test)


def test_signals_are_the_parents_affair(folder: Path) -> None:
    async def test() -> None:
        async with serving(options(folder)) as client:
            assert client.pid is not None
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(client.pid, number)
                assert len(tokens(await read(client.submit(request("a"))))) == 8
            assert client.state == "ready"

    run(test)


@pytest.mark.usefixtures("unchecked_engines")
def test_a_model_runs_in_the_process_as_it_does_here_and_a_failing_step_fails_all(folder: Path) -> None:
    async def test() -> None:
        requests = [request(str(i), list(range(i, i + 40)), temperature=float(i % 2), logprobs=1) for i in range(6)]
        expected = generate(build_engine(options(folder, executor="torch")).loop, requests)
        async with serving(options(folder, executor="torch")) as client:
            for one, outputs in zip(
                requests, await asyncio.gather(*(read(client.submit(r)) for r in requests)), strict=True
            ):
                assert tokens(outputs) == tokens(expected[one.request_id])
                assert outputs[-1].logprobs is not None
            live = client.submit(request("live", max_tokens=4000, temperature=0.0))
            await anext(live)
            bad = client.submit(request("bad", [BYTES.vocab_size + 1]))
            for stream in (live, bad):
                outputs = await read(stream)
                assert outputs[-1].finish_reason == "error"
                assert "the engine failed" in str(outputs[-1].error)
            await until(lambda: client.state == "restarting")
            await until(lambda: client.error == "the engine process exited with status 3")
            await client.wait_ready()
            assert tokens(await read(client.submit(requests[0]))) == tokens(expected["0"])

    run(test)


def test_an_engine_that_cannot_start_says_why(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    huge = replace(options(folder, executor="torch"), model=ModelOptions(model=str(folder), max_model_len=4096))
    huge = replace(huge, cache=replace(huge.cache, kv_cache_bytes=1000))
    causes = [
        (options(tmp_path, executor="torch"), f"{tmp_path}/config.json: cannot be read"),
        (options(broken, executor="torch"), f"{weights}: truncated"),
        (huge, "--kv-cache-bytes is 1000"),
    ]

    async def test() -> None:
        for bad, reason in causes:
            client = EngineClient(bad)
            await client.start()
            with pytest.raises(EngineError) as caught:
                await client.wait_ready()
            assert reason in str(caught.value)
            assert "\n" not in str(caught.value)
            assert (client.state, client.error) == ("failed", str(caught.value))
            await client.stop()

    run(test)
    assert "Traceback" not in capfd.readouterr().err


def test_a_failed_engine_ends_by_itself_in_order(tmp_path: Path) -> None:
    """The thread that waits for the end of stdin is not in the way of the interpreter's own end."""
    address = f"ipc://{tmp_path}/engine"

    async def test() -> None:
        command = (sys.executable, "-m", "oscine.engine.process.server")
        engine = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert engine.stdin is not None
        engine.stdin.write(msgspec.json.encode(Launch(address, options(tmp_path))) + b"\n")
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as client:
            client.set(zmq.LINGER, 0)
            client.connect(address)
            await client.send(encode(Hello()))
            failed = decode_to_client(await client.recv())
        assert isinstance(failed, Failed)
        assert "config.json: cannot be read" in failed.message
        assert engine.stderr is not None
        assert (await engine.stderr.read(), await engine.wait()) == (b"", 2)
        engine.stdin.close()

    run(test)


def test_an_engine_that_keeps_dying_at_its_start_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))

    async def test() -> None:
        client = EngineClient(options(folder))
        await client.start()
        with pytest.raises(EngineError, match="exited with status 1 while starting"):
            await client.wait_ready()
        assert client.state == "failed"
        await client.stop()

    run(test)


PARENT = """
import asyncio, sys
from oscine.settings.config import EngineOptions, ModelOptions
from oscine.engine.process.client import EngineClient
async def main():
    client = EngineClient(EngineOptions(model=ModelOptions(model=sys.argv[1]), executor="fake"))
    await client.start()
    await client.wait_ready()
    print(client.pid, client.address, flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


def test_the_engine_does_not_outlive_its_parent(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid, address = parent.stdout.readline().decode().split()
        engine, folder_of_socket = psutil.Process(int(pid)), Path(address.removeprefix("ipc://")).parent
        assert folder_of_socket.is_dir()
        parent.kill()
        engine.wait(PATIENCE_S)
    assert not folder_of_socket.exists()


def test_what_is_left_of_a_server_and_its_engine_goes_with_the_next_engine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = make_temporary(SOCKETS)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(left.path / "engine"))
    left.close()  # as the kernel does if both are killed
    monkeypatch.setattr(sys, "executable", shutil.which("false"))

    async def test() -> None:
        client = EngineClient(options(folder))
        await client.start()
        assert not left.path.exists()
        await client.stop()
        assert list(tmp_path.iterdir()) == []

    run(test)


def test_without_a_temporary_folder_an_engine_says_what_helps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")

    async def test() -> None:
        with pytest.raises(EngineError, match=r"no folder for temporary files can be made: .*TMPDIR names another"):
            await EngineClient(options(folder)).start()

    run(test)


def test_an_engine_that_ends_removes_its_socket_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bystander").touch()
    launch = msgspec.json.encode(Launch(f"ipc://{tmp_path}/engine", options(folder))) + b"\n"
    subprocess.run([sys.executable, "-m", "oscine.engine.process.server"], input=launch, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["bystander"]
    (tmp_path / "bystander").unlink()
    subprocess.run([sys.executable, "-m", "oscine.engine.process.server"], input=launch, check=True)
    assert list(tmp_path.iterdir()) == []  # and not the folder, which the engine's parent did not make


def test_the_fake_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys; from oscine.settings.config import *; from oscine.engine.build import build_engine\n"
        "build_engine(EngineOptions(model=ModelOptions(model=sys.argv[1]), executor='fake'))\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


@pytest.mark.slow  # no part of the server imports them
def test_what_a_quick_import_of_torch_leaves_out_can_be_imported_later() -> None:
    code = (
        "import sys; from oscine.executor.start.torch_process import import_torch\n"
        "import_torch(); import torch\n"
        "left_out = {'torch._meta_registrations', 'torch.export'}\n"
        "assert not left_out & set(sys.modules)\n"
        "torch.randn(2, generator=torch.Generator())\n"
        "from torch import _meta_registrations, export\n"
        "module = torch.nn.Linear(2, 3)\n"
        "assert export.export(module, (torch.ones(1, 2),)).module()(torch.ones(1, 2)).shape == (1, 3)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """For a while this process may open no files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_engine_comes_back_when_there_are_descriptors_again(folder: Path) -> None:
    async def test() -> None:
        async with serving(options(folder)) as client:
            first = client.pid
            assert first is not None
            with no_descriptors():
                os.kill(first, signal.SIGKILL)
                await until(lambda: client.state == "restarting")
                await until(lambda: "no engine process can be started" in (client.error or ""))
                reported = client.error
                client.error = None
                await until(lambda: client.error == reported)  # it was tried again
                assert client.state == "restarting"
            await client.wait_ready()
            assert client.pid != first
            assert len(tokens(await read(client.submit(request("0"))))) == 8

    run(test)


@pytest.mark.parametrize("name", ["supervisor", "connection"])
def test_a_lack_of_descriptors_that_lasts_is_a_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(f"oscine.engine.process.{name}.STARVED_S", 0.5)

    async def test() -> None:
        async with serving(options(folder)) as client:
            assert client.pid is not None
            with no_descriptors():
                os.kill(client.pid, signal.SIGKILL)
                await until(lambda: client.state == "failed")
                with pytest.raises(EngineError, match="can be"):
                    await client.wait_ready()

    run(test)


def test_an_engine_for_which_there_never_was_a_process_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    async def test() -> None:
        client = EngineClient(options(folder))
        await client.start()
        with pytest.raises(EngineError, match="no engine process can be started"):
            await client.wait_ready()
        assert client.state == "failed"
        await client.stop()

    run(test)


def test_connections_leave_descriptors_for_the_rest() -> None:
    assert connection_limit(4096, 1 << 20) == 4096
    assert connection_limit(4096, 1024) == 768
    assert connection_limit(4096, 100) == 50
    assert connection_limit(10, 1024) == 10
