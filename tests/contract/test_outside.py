"""Another package adds to Oscine by entry points."""

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.serving.server import Server
from oscine.api import apis
from oscine.api.serving import tools
from oscine.chat.toolbox import ToolResult
from oscine.cli import commands
from oscine.settings.config import ToolOptions

CODE = """
from starlette.responses import PlainTextResponse

from oscine.api.interface import Api
from oscine.api.openapi import GET
from oscine.chat.messages import ToolNamespace
from oscine.chat.toolbox import Tool, ToolResult
from oscine.cli.commands import Command

class Greeter(Tool):
    namespace = ToolNamespace("greet", "Greets somebody.", ())

    async def call(self, recipient, content):
        return ToolResult(f"hello {content}", None)


class Greeters:
    on_offer = [{"type": "greet"}]

    def __init__(self, options):
        pass

    async def start(self):
        pass

    async def stop(self):
        pass

    def open(self, tool, state):
        return Greeter() if tool["type"] == "greet" else None


class GreetingApi(Api):
    @property
    def operations(self):
        return [GET("/greeting", self.greet, "A greeting", answer="text/plain")]

    async def greet(self, request):
        return PlainTextResponse(f"hello from {self.service.models[0].names[0]}")


GREET = Command("greet", "greet somebody", "greeting:arguments")
WRONG = "no command"


def arguments(parser):
    parser.add_argument("name")
    parser.set_defaults(run=lambda args: print(f"hello {args.name}"))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder for sys.path, as an installed distribution leaves it."""
    tmp_path.joinpath("greeting.py").write_text(CODE)
    metadata = tmp_path / "greeting-1.0.dist-info"
    metadata.mkdir()
    metadata.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
    metadata.joinpath("entry_points.txt").write_text(
        f"[{commands.GROUP}]\ngreet = greeting:GREET\nwrong = greeting:WRONG\nserve = greeting:GREET\n"
        f"[{tools.GROUP}]\ngreet = greeting:Greeters\nbroken = greeting:absent\n"
        f"[{apis.GROUP}]\ngreeting = greeting:GreetingApi\nbroken = greeting:absent\n"
    )
    return tmp_path


def oscine(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(package)!r}); from oscine.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_a_command(package: Path) -> None:
    done = oscine(package, "greet", "Ada")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello Ada\n", "")
    assert "Greet somebody." in oscine(package, "greet", "--help").stdout


def test_an_api(package: Path) -> None:
    with tempfile.TemporaryFile() as log:
        with Server("oscine-nano", "--executor", "fake", environment={"PYTHONPATH": str(package)}, log=log) as server:
            assert server.get("/greeting") == "hello from oscine-nano"
            described = json.loads(server.get("/openapi.json"))["paths"]["/greeting"]["get"]["responses"]["200"]
            assert [*described["content"]] == ["text/plain"]
        log.seek(0)
        warnings = [line for line in log.read().decode().splitlines() if "broken" in line]
    why = "of greeting:absent cannot be used: module 'greeting' has no attribute 'absent'"
    assert [line.partition(" the ")[2] for line in warnings] == [f"tools broken {why}", f"API broken {why}"]


def test_a_tool(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(package)
    found = tools.ServerTools(ToolOptions())
    assert found.on_offer == [{"type": "greet"}]

    async def call() -> ToolResult:
        async with found.toolbox([{"type": "web_search"}, {"type": "greet"}]) as toolbox:
            assert toolbox.recipients == ("greet",)
            return await toolbox.call("greet", "Ada")

    assert asyncio.run(call()) == ToolResult("hello Ada", None)
    assert asyncio.run(found.stop()) is None


def test_a_broken_command_costs_one_line_of_warning(package: Path) -> None:
    done = oscine(package, "wrong")
    assert done.returncode == 2
    warning, error = done.stderr.splitlines()
    assert (
        warning == "oscine: warning: the command wrong of greeting:WRONG cannot be used: greeting:WRONG is no Command"
    )
    assert error.startswith("oscine: error: argument COMMAND: it must be one of serve, ")


def test_no_package_replaces_a_command(package: Path) -> None:
    assert "usage: oscine serve" in oscine(package, "serve", "--help").stdout


def test_a_command_whose_extension_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = commands.Command("gone", "do what was deleted", "oscine.extensions.deleted.inner.command:arguments")
    monkeypatch.setattr(commands, "COMMANDS", (*commands.COMMANDS, gone))
    assert gone not in commands.installed()
    with pytest.raises(commands.CommandError, match=r"^oscine gone needs the extension deleted$"):
        commands.find("gone")
