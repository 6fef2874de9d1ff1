"""The server's states: starting, ready, restarting after a crash, draining."""

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.serving.server import engines_below
from oscine.api.server import Server, ServerError
from oscine.extensions.tools.builtin import BuiltinTools
from oscine.settings.config import Config, EngineOptions, ModelOptions, ServerOptions
from tests.api.raw_client import LONG_ANSWER, RawClient, chat_body
from tests.api.scripted_server import ScriptedServer
from tests.server import ServerProcess
from tests.waiting import wait_until


def serve(folder: Path, *options: str, step_s: float = 0.005) -> ServerProcess:
    return ServerProcess(
        str(folder), "--executor", "fake", "--fake-step-s", str(step_s), "--log-level", "error", *options
    )


def health(server: ServerProcess) -> dict[str, Any]:
    try:
        return dict(json.loads(server.get("/health")))
    except urllib.error.HTTPError as error:
        return dict(json.loads(error.read()))


def ready_status(server: ServerProcess) -> int:
    try:
        server.get("/v1/health/ready")
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def test_sigterm_lets_running_requests_finish(model_folder: Path) -> None:
    with serve(model_folder) as server, RawClient(server) as running, RawClient(server) as late:
        children = server.processes()
        running.post(chat_body(stream=True, max_tokens=300, ignore_eos=True, stream_options={"include_usage": True}))
        running.read_until(b'"content":"O"')
        server.terminate()
        wait_until(lambda: health(server)["status"] == "draining", "the drain")
        assert ready_status(server) == 503
        assert server.get("/v1/health/live")
        late.post(chat_body())
        refused = late.read_until(b"draining")
        assert refused.split()[1] == b"503"
        assert b"retry-after" in refused
        rest = running.read_until(b"data: [DONE]")
        assert b'"finish_reason":"length"' in rest
        assert b'"completion_tokens":300,' in rest
        assert server.exit_code() == 0
        wait_until(lambda: not any(child.is_running() for child in children), "the end of the engine")


def test_a_drain_has_an_end(model_folder: Path) -> None:
    with serve(model_folder, "--drain-s", "0.05") as server, RawClient(server) as streaming, RawClient(server) as whole:
        streaming.post(LONG_ANSWER | {"stream": True})
        begun = streaming.read_until(b'"content":"O"')
        assert begun.split()[1] == b"200"
        whole.post(LONG_ANSWER)
        server.wait_running(2)
        server.terminate()
        streamed, answer = streaming.read_to_end(), whole.read_to_end()
        assert b'"code":"draining"' in streamed
        assert b"data: [DONE]" in streamed
        assert b'"code":"draining"' in answer
        assert answer.split()[1] == b"503"
        assert server.exit_code() == 0


def test_a_client_that_does_not_read_cannot_hold_up_the_end(model_folder: Path) -> None:
    with serve(model_folder, "--drain-s", "0.05", step_s=0.0) as server, RawClient(server, receive_buffer=4096) as idle:
        idle.post(LONG_ANSWER | {"stream": True})
        wait_until(lambda: server.metric("oscine:generation_tokens_total") == 20_000, "more than any buffer holds")
        assert server.metric("oscine:http_requests_in_progress") == 2, "it waits for its client"
        server.terminate()
        assert server.exit_code() == 0


def test_a_second_signal_ends_the_drain(model_folder: Path) -> None:
    with serve(model_folder) as server, RawClient(server) as running:
        running.post(LONG_ANSWER | {"stream": True})
        running.read_until(b'"content":"O"')
        server.terminate()
        wait_until(lambda: health(server)["status"] == "draining", "the drain")
        os.kill(server.pid, signal.SIGINT)
        assert b'"code":"draining"' in running.read_until(b"data: [DONE]")
        assert server.exit_code() == 0


def test_a_crashed_engine_fails_its_requests_and_comes_back(model_folder: Path) -> None:
    with serve(model_folder) as server, RawClient(server) as streaming, RawClient(server) as waiting:
        streaming.post(LONG_ANSWER | {"stream": True})
        streaming.read_until(b'"content":"O"')
        waiting.post(LONG_ANSWER)
        server.wait_running(2)
        server.engine.kill()
        assert b'"code":"engine_died"' in streaming.read_until(b"data: [DONE]")
        answer = waiting.read_until(b"engine_died")
        assert answer.split()[1] == b"503"
        state = health(server)
        assert state["status"] in ("restarting", "ready")
        wait_until(lambda: ready_status(server) == 200, "the new engine")
        with RawClient(server) as client:
            client.post(chat_body())
            assert client.status() == 200
        assert server.metric("oscine:engine_restarts_total") == 1
        server.wait_idle()


def test_a_server_whose_engine_is_given_up_does_not_live(scripted: ScriptedServer) -> None:
    assert scripted.get("/v1/health/live").status_code == 200
    scripted.engine.state = "failed"
    assert scripted.get("/v1/health/live").status_code == 503


def test_a_start_that_breaks_ends_the_server(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by an exception that nobody thought of: nothing would ever make it ready."""

    async def broken(tools: BuiltinTools) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(BuiltinTools, "start", broken)
    server = Server(Config(EngineOptions(model=ModelOptions(model=str(model_folder))), ServerOptions(port=0)))
    with pytest.raises(ServerError, match="Too many open files"):
        asyncio.run(asyncio.wait_for(server.run_service(lambda info: None), 60))


def run_serve(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "oscine", "serve", "--port", "0", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def only_line(text: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith("oscine: error: "))
    assert "Traceback" not in text
    return line


def test_a_model_that_does_not_exist() -> None:
    done = run_serve("/no/such/model")
    assert done.returncode == 1
    assert "/no/such/model" in only_line(done.stderr)


def test_a_broken_config_file(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    config = json.loads((model_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": "large"}))
    done = run_serve(str(tmp_path), "--executor", "fake")
    assert done.returncode == 1
    assert "hidden_size" in only_line(done.stderr)


def test_a_vocabulary_that_is_not_the_models(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    config = json.loads((model_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 260, "eos_token_id": 0}))
    done = run_serve(str(tmp_path), "--executor", "fake")
    assert done.returncode == 1
    assert f"{tmp_path}/tokenizer.json is not the vocabulary of {tmp_path}" in only_line(done.stderr)


def test_a_port_that_is_taken(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run_serve(str(model_folder), "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert str(taken) not in done.stderr
    assert "cannot listen" in only_line(done.stderr)


def test_liveness_and_readiness_while_the_engine_starts(model_folder: Path, tmp_path: Path) -> None:
    """A named pipe holds the engine's process up for as long as the test wants."""
    go = tmp_path / "go"
    os.mkfifo(go)
    hold = f"import sys\nif any('oscine.engine' in word for word in sys.orig_argv):\n    open({str(go)!r}).close()\n"
    (tmp_path / "sitecustomize.py").write_text(hold)
    paths = os.pathsep.join((str(tmp_path), str(Path(__file__).parent.parent.parent)))
    port = tmp_path / "port"
    command = [sys.executable, "-m", "oscine", "serve", str(model_folder), "--executor", "fake", "--port", "0"]
    with subprocess.Popen(
        [*command, "--port-file", str(port)], stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": paths}
    ) as process:
        wait_until(port.exists, "the port")
        url = f"http://127.0.0.1:{port.read_text().strip()}"
        assert urllib.request.urlopen(f"{url}/v1/health/live", timeout=30).status == 200
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{url}/v1/health/ready", timeout=30)
        assert (caught.value.code, json.load(caught.value)["status"]) == (503, "starting")
        go.write_text("")

        def is_ready() -> bool:
            try:
                return bool(urllib.request.urlopen(f"{url}/v1/health/ready", timeout=30).status == 200)
            except urllib.error.HTTPError:
                return False

        wait_until(is_ready, "readiness")
        process.terminate()
        assert process.wait(timeout=30) == 0


class FewFiles(ServerProcess):
    """A server that may open few files, whatever the limits of this process are."""

    def __init__(self, *options: str) -> None:
        super().__init__(*options)
        self._command = ["sh", "-c", 'ulimit -n 400; exec "$@"', "sh", *self._command]


def test_clients_that_hold_all_connections_do_not_keep_an_engine_from_coming_back(model_folder: Path) -> None:
    with FewFiles(str(model_folder), "--executor", "fake", "--log-level", "error") as server:
        first = server.engine
        with ExitStack() as held:
            clients = [held.enter_context(RawClient(server)) for _ in range(500)]
            clients[-1].post(chat_body(max_tokens=1))
            assert clients[-1].status() == 200, "connections are accepted in order: all of them were"
            assert psutil.Process(server.pid).num_fds() > 200
            first.kill()
            wait_until(lambda: not first.is_running(), "the end of the engine")
            wait_until(lambda: len(server._engines()) == 1, "another engine")
        wait_until(lambda: ready_status(server) == 200, "readiness")
        assert server.post("/v1/chat/completions", chat_body(max_tokens=5))["choices"]


def test_what_an_engine_has_just_forked_is_not_taken_for_an_engine() -> None:
    program = "import os, sys; os.fork(); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, "oscine.engine.process.server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        engine.stdout.read(2)  # both say that they run
        (found,) = [process for process in engines_below(psutil.Process()) if process.cmdline() == command]
        assert found.pid == engine.pid
