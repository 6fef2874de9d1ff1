"""Tools of the server, declared in conversations that need none of them."""

from dataclasses import replace

from oscine.chat.messages import FunctionTool, ToolNamespace
from oscine.extensions.tools import browser, python
from oscine.settings.config import ToolOptions
from training import words
from training.episode import Episode
from training.functions import make_function
from training.split import Draw

_PYTHON = python.PythonTool(None, ToolOptions()).namespace  # type: ignore[arg-type]  # never run here


def beside_builtin_tools(draw: Draw, episode: Episode) -> Episode:
    """The same episode with the server's browser, Python or a remote server's tools declared."""
    offers = ((_PYTHON,), (browser.DECLARATION,), (browser.DECLARATION, _PYTHON), (_remote(draw),))
    return replace(episode, namespaces=draw.choice(offers))


def _remote(draw: Draw) -> ToolNamespace:
    """Tools of a Model Context Protocol server under a made-up label."""
    tools: dict[str, FunctionTool] = {}
    for _ in range(draw.integer(1, 3)):
        tool = make_function(draw).tool
        tools.setdefault(tool.name, tool)
    return ToolNamespace(words.made_up(draw), "", tuple(tools.values()))
