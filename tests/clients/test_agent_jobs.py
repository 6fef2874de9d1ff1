"""Long jobs of agents and SDKs, unmodified: `make agents`, which installs them into runs/agents.

Each makes the calls of a script, and its tools really run. HTTP, prompts, parsing and the prefix cache are the
server's; only what the model writes is scripted. All that the server answers is checked with the types of openai and
anthropic.
"""

import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.scripted_agent import Asked, Call, ScriptedAgent, Share
from tests.clients.test_agent_recipes import AGENTS, HANGS_S, commands, recipe, run

pytestmark = pytest.mark.timeout(2 * HANGS_S)  # of a test, which runs two commands at most
TURNS = 30
LIMIT = 64_000  # tokens of a small context
SEES = {  # the client believes that the model sees, and sends pictures
    '"input_modalities": ["text"]': '"input_modalities": ["text", "image"]',
    '"tool_call": true': '"tool_call": true, "attachment": true, '
    '"modalities": {"input": ["text", "image"], "output": ["text"]}',
}
SMALLER = {"131072": "64000", "98304": "48000", "114688": "47616"}
PICTURE = "image/png"  # in the text in place of one
TASK = "Mend the shop, step by step."
MORE = "Now go on with the rest."


Sizes = Mapping[str, str]


def picture() -> bytes:
    """A PNG of 8 x 8 red points."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack("!IIBBBBB", 8, 8, 8, 2, 0, 0, 0))
    rows = b"".join(b"\0" + b"\xff\0\0" * 8 for _ in range(8))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@dataclass(frozen=True)
class Client:
    """How an agent is started, and what its tools are called with."""

    first: str  # commands
    resumed: str
    run: Callable[[str], Call]
    write: Callable[[Path, str], list[Call]]
    edit: Callable[[Path, str, str], list[Call]]
    look: Callable[[Path], Call]
    search: list[Call]  # for tools that are declared later
    found: str  # declared then
    is_aside: Callable[[str], bool]  # whether the newest message asks for a summary


def _patch(path: Path, *lines: str) -> Call:
    return Call("apply_patch", "\n".join(["*** Begin Patch", *lines, "*** End Patch\n"]))


CLIENTS = {
    "Codex": Client(
        first='codex exec --dangerously-bypass-approvals-and-sandbox "$TASK"',
        resumed='codex exec --dangerously-bypass-approvals-and-sandbox resume --last "$TASK"',
        run=lambda command: Call("exec_command", {"cmd": command}),
        write=lambda path, text: [_patch(path, f"*** Add File: {path.name}", *(f"+{t}" for t in text.splitlines()))],
        edit=lambda path, old, new: [_patch(path, f"*** Update File: {path.name}", "@@", f"-{old}", f"+{new}")],
        look=lambda path: Call("view_image", {"path": str(path)}),
        search=[Call("tool_search", {"query": "spawn agents"})],
        found="spawn_agent",
        is_aside=lambda text: "CONTEXT CHECKPOINT COMPACTION" in text,
    ),
    "Claude Code": Client(
        first='claude -p --dangerously-skip-permissions "$TASK"',
        resumed='claude -p --dangerously-skip-permissions --continue "$TASK"',
        run=lambda command: Call("Bash", {"command": command, "description": "Run a step"}),
        write=lambda path, text: [Call("Write", {"file_path": str(path), "content": text})],
        edit=lambda path, old, new: [
            Call("Read", {"file_path": str(path)}),
            Call("Edit", {"file_path": str(path), "old_string": old, "new_string": new}),
        ],
        look=lambda path: Call("Read", {"file_path": str(path)}),
        search=[Call("ToolSearch", {"query": "select:WebFetch"})],
        found="type WebFetch = ",
        is_aside=lambda text: "create a detailed summary" in text,
    ),
    "opencode": Client(
        first='opencode run "$TASK"',
        resumed='opencode run --continue "$TASK"',
        run=lambda command: Call("bash", {"command": command}),
        write=lambda path, text: [Call("write", {"filePath": str(path), "content": text})],
        edit=lambda path, old, new: [
            Call("read", {"filePath": str(path)}),
            Call("edit", {"filePath": str(path), "oldString": old, "newString": new}),
        ],
        look=lambda path: Call("read", {"filePath": str(path)}),
        search=[],
        found="",
        is_aside=lambda text: "Here is the conversation so far" in text,
    ),
}

JOBS = Path(__file__).parent / "jobs"
INSTALLED = Path(__file__).parents[2] / "runs" / "agents"


def _sdk(command: str, *search: Call, found: str = "") -> Client:
    """The scripts in jobs/ have tools of the same names."""
    return Client(
        first=command,
        resumed=command,
        run=lambda line: Call("run", {"command": line}),
        write=lambda path, text: [Call("write", {"path": str(path), "content": text})],
        edit=lambda path, old, new: [Call("edit", {"path": str(path), "old": old, "new": new})],
        look=lambda path: Call("look", {"path": str(path)}),
        search=[*search],
        found=found,
        is_aside=lambda text: "Write a summary of this conversation" in text or "<messages>" in text,
    )


_PYTHON = f"{INSTALLED}/python/bin/python {JOBS}"
CLIENTS |= {
    "openai-agents": _sdk(f'{_PYTHON}/openai_agents_job.py $URL/v1 48000 "$TASK"'),
    "LangChain": _sdk(f'{_PYTHON}/langchain_job.py $URL/v1 8000 "$TASK"'),  # which it counts as characters / 4
    "AI SDK": _sdk(
        f'node {INSTALLED}/ai_sdk_job.mjs $URL/v1 48000 "$TASK"',
        Call("tool_search", {"query": "weather"}),
        found="type weather = ",
    ),
}


class Place:
    """An agent's home, and a folder that it works in."""

    def __init__(self, agent: str, server: ScriptedAgent, home: Path, folder: Path, sizes: Sizes | None = None) -> None:
        """`sizes` replace those of the recipe."""
        home.mkdir(exist_ok=True)
        folder.mkdir()
        text = recipe(agent, server) if agent in AGENTS else ""
        for old, new in (sizes or {}).items():
            text = text.replace(old, new)
        if agent in AGENTS:
            AGENTS[agent](text, home, folder)
        self._exports = "\n".join(line for line in commands(text).splitlines() if line.startswith("export"))
        self._home, self._url, self.folder = home, server.url, folder

    def ask(self, command: str, task: str) -> str:
        return run(f"{self._exports}\n{command}", self._home, self.folder, TASK=task, URL=self._url, IS_SANDBOX="1")


def steps(client: Client, folder: Path, count: int) -> list[Call]:
    """Writes a program, searches for tools, edits the program, and runs it."""
    shop = folder / "shop.py"
    program = "import sys\nprice = 20\nprint('step', sys.argv[1], price)\n"
    first = [*client.write(shop, program), *client.search, *client.edit(shop, "price = 20", "price = 21")]
    return [*first, *(client.run(f"python3 shop.py {i}; seq 40") for i in range(len(first), count))]


@pytest.mark.node
@pytest.mark.parametrize("agent", CLIENTS)
def test_a_second_job_finds_what_it_shares_in_the_cache(agent: str, tmp_path: Path) -> None:
    """In another folder. What is shared is the longest common prefix of each request and the one before it, in whole
    pages, and for the first one that with the first one of the earlier job."""
    client = CLIENTS[agent]
    with ScriptedAgent(is_aside=client.is_aside) as server:
        firsts: list[Asked] = []
        for name in ("shop", "office"):
            place = Place(agent, server, tmp_path / "home", tmp_path / name)
            server.begin(steps(client, place.folder, TURNS - 1))
            assert server.last in place.ask(client.first, TASK)
            assert not server.left
            last = server.text(server.asked[-1])
            assert f"step {TURNS - 2} 21" in last
            assert client.found in last
            firsts.append(server.asked[0])
        share = Share.of(firsts[0], server.asked)
    print(f"{agent}: {share}; {server.app.num_events} events of {server.app.num_answers} answers")
    assert len(server.asked) >= TURNS
    assert share.cached >= 0.95 * share.common
    assert share.common >= 0.95 * share.before, "each turn continues the one before it"


@pytest.mark.node
@pytest.mark.parametrize("with_picture", [False, True], ids=["text", "picture"])
@pytest.mark.parametrize("agent", CLIENTS)
def test_a_job_goes_on_beyond_the_context(agent: str, with_picture: bool, tmp_path: Path) -> None:
    """Its results are longer than the context in all. With a picture it is resumed, and longer again."""
    client = CLIENTS[agent]
    with ScriptedAgent(LIMIT, client.is_aside) as server:
        place = Place(agent, server, tmp_path / "home", tmp_path / "shop", {**SMALLER, **SEES})
        png = place.folder / "logo.png"
        png.write_bytes(picture())
        reads = [client.run(f"echo step {i}; seq {1000 * i} {1000 * i + 2000}") for i in range(1, 9)]
        look = [client.look(png)] if with_picture else []
        for command, task in ((client.first, TASK), (client.resumed, MORE))[: 1 + with_picture]:
            server.begin([*reads[:3], *look, *reads[3:]])
            assert server.last in place.ask(command, task)
            assert not server.left
            assert any(client.is_aside(newest) for newest in server.asides), "it compacts"
            assert any(PICTURE in server.text(asked) for asked in server.asked) == with_picture


@pytest.mark.node
def test_opencode_goes_on_after_a_refused_request(tmp_path: Path) -> None:
    """Without a limit of its input it learns of the end of the context by an error. Its status is 1 then."""
    client = CLIENTS["opencode"]
    with ScriptedAgent(LIMIT, client.is_aside) as server:
        place = Place("opencode", server, tmp_path / "home", tmp_path / "shop", {'"input": 114688, ': "", **SMALLER})
        server.begin([client.run(f"echo step {i}; seq {1000 * i} {1000 * i + 2000}") for i in range(1, 6)])
        said = place.ask(f"{client.first} || test $? = 1", TASK)
        assert server.last in said
        assert not server.left
        assert len(server.asides) > 1
