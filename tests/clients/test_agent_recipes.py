"""Agents run as docs/clients.md says, in two folders: `make agents`, which installs them with npm into runs/agents.

The server has the embedded model's vocabulary; its answers are scripted, or the fake executor's.
"""

import contextlib
import os
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from oscine.executor.fake import TEXT
from tests.clients.scripted_agent import Asked, ScriptedAgent, Share
from tests.server import ServerProcess

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / "runs" / "agents" / "node_modules" / ".bin"
NANO = ROOT / "oscine" / "model" / "nano"
DOCUMENT = (ROOT / "docs" / "clients.md").read_text()
HANGS_S = 1800  # of one command, which takes a minute on two idle cores
pytestmark = pytest.mark.timeout(2 * HANGS_S)  # of a test, which runs two commands at most


class Addressed(Protocol):
    @property
    def url(self) -> str: ...


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    name = ("--served-model-name", "oscine-nano", "--log-level", "warning")
    with ServerProcess(str(NANO), "--executor", "fake", *name) as server:
        yield server


def recipe(name: str, server: "Addressed") -> str:
    return DOCUMENT.partition(f"\n## {name}\n")[2].partition("\n## ")[0].replace("http://127.0.0.1:8000", server.url)


def block(text: str, language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


def prepare_codex(text: str, home: Path, folder: Path) -> None:
    (home / ".codex").mkdir(exist_ok=True)
    (home / ".codex" / "config.toml").write_text(block(text, "toml"))
    (home / ".codex" / "models.json").write_text(block(text, "json"))
    subprocess.run(["git", "init", "-q", folder], check=True)  # Codex runs in repositories


def prepare_opencode(text: str, home: Path, folder: Path) -> None:
    (folder / "opencode.json").write_text(block(text, "json"))


def prepare_nothing(text: str, home: Path, folder: Path) -> None:
    pass


AGENTS: dict[str, Callable[[str, Path, Path], None]] = {
    "Codex": prepare_codex,
    "Claude Code": prepare_nothing,
    "opencode": prepare_opencode,
}


def commands(text: str) -> str:
    """The indented lines outside of blocks."""
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return "\n".join(line[4:] for line in plain.splitlines() if line.startswith("    "))


def run(script: str, home: Path, folder: Path, **more: str) -> str:
    environment = {"HOME": str(home), "PATH": f"{INSTALLED}:{os.environ['PATH']}", **more}
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANGS_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.node
@pytest.mark.parametrize("agent", AGENTS)
def test_the_recipe_runs_and_a_second_folder_finds_the_prefix(agent: str, tmp_path: Path) -> None:
    """What the prompts have in common comes from the cache. All declarations of tools are in it, and the first
    difference is the name of the folder."""
    home, asked = tmp_path / "home", list[Asked]()
    home.mkdir()
    with ScriptedAgent() as server:
        for name in ("shop", "office"):
            folder, text = tmp_path / name, recipe(agent, server)
            folder.mkdir()
            AGENTS[agent](text, home, folder)
            server.begin(())
            assert server.last in run(commands(text), home, folder)
            asked.append(server.asked[0])
        share = Share.of(asked[0], asked[1:])
        tokens = Share.common_prefix(asked[0].prompt, asked[1].prompt)
        texts = [server.text(of) for of in asked]
    common = texts[1][: Share.common_prefix(*([*map(ord, text)] for text in texts))]
    print(f"{agent}: {share.cached} from the cache, {tokens} in common of {len(asked[1].prompt)}: ...{common[-120:]!r}")
    assert share.cached >= 0.95 * share.common
    assert "} // namespace functions" in common
    if common != texts[1]:
        assert _dashed(common).endswith(_dashed(f"{tmp_path}/")), common[-200:]
        rests = [text[len(common) :] for text in texts]
        assert (rests[0].startswith("shop"), rests[1].startswith("office")) == (True, True), [of[:80] for of in rests]


def _dashed(path: str) -> str:
    """Claude Code names folders of its own so after a path."""
    return re.sub(r"[^A-Za-z0-9]", "-", path)


class Relay:
    """Context manager: passes connections on to a server, and keeps what each client has sent."""

    def __init__(self, server: ServerProcess) -> None:
        self._server, self.sent = server, list[bytearray]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "Relay":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._server.host, self._server.port))
                kept = bytearray()
                self.sent.append(kept)
                for pair in ((client, server, kept), (server, client, None)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, kept: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if kept is not None:
                    kept += data
                to.sendall(data)
        for one in (source, to):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@pytest.mark.node
def test_codex_asks_over_one_connection(server: ServerProcess, tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "shop"
    for path in (home, folder):
        path.mkdir()
    with Relay(server) as relay:
        text = recipe("Codex", server).replace(server.url, relay.url)
        prepare_codex(text, home, folder)
        assert TEXT.strip() in run(commands(text), home, folder)
        (sent,) = relay.sent
        assert sent.startswith(b"GET /v1/responses HTTP/1.1")
        assert b"Upgrade: websocket" in sent
        assert sent.count(b"HTTP/1.1") == 1
