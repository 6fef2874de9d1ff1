"""Rules of the repository that no linter holds: sizes, rooms, what an import may load, what is shipped, ports."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from oscine.system.extensions import extension_of

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "oscine").rglob("*.py"))
MODULES = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in SOURCES}
ROOMS = sorted({p.parent for p in SOURCES})
# Old names of modules that users have in files, for a release. They are no part of the nucleus.
ALIASES = {
    "oscine.cli.cluster": "",
    "oscine.cli.cluster.serve_config": "oscine.extensions.cluster.cli.serve_config",
    "oscine.cluster": "",
    "oscine.cluster.ray": "",
    "oscine.cluster.ray.autoscaling": "oscine.extensions.cluster.ray.autoscaling",
}
FILE_LINES, KERNEL_LINES = 600, 800
ROOM_MODULES = 15
FUNCTION_LINES = 60
NANO_BYTES = 12_000_000


def is_kernel(path: Path) -> bool:
    return "ops" in path.relative_to(ROOT).parts


@pytest.mark.long
@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_holds_one_noun_in_a_readable_length(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= (KERNEL_LINES if is_kernel(path) else FILE_LINES)
    if is_kernel(path):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < FUNCTION_LINES, f"{node.name} is too long"


def is_door(path: Path) -> bool:
    """What Python itself looks for in a folder. It may import from any room below."""
    return path.stem in ("__init__", "__main__")


@pytest.mark.long
@pytest.mark.parametrize("room", ROOMS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_has_few_modules_none_of_which_repeats_its_name(room: Path) -> None:
    names = [path.stem for path in SOURCES if path.parent == room and not is_door(path)]
    assert len(names) <= ROOM_MODULES
    assert not [name for name in names if room.name in name.split("_") or room.name.rstrip("s") in name.split("_")]


def imported(path: Path) -> set[str]:
    """The modules of Oscine that a module names in its imports, wherever they stand."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= names or {node.module} & MODULES.keys()
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & MODULES.keys()
    return found


@pytest.mark.long
def test_imports_have_no_circles_between_modules_nor_between_rooms() -> None:
    """Imports from the nucleus to extensions, which tests/contract/test_moves.py counts, join modules and no rooms."""
    modules: dict[str, set[str]] = {}
    rooms: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if is_door(path):
            continue
        modules[name] = {other for other in imported(path) if not is_door(MODULES[other])}
        room = name.rpartition(".")[0]
        near = (other for other in modules[name] if extension_of(name) or not extension_of(other))
        rooms.setdefault(room, set()).update(other.rpartition(".")[0] for other in near)
        rooms[room].discard(room)
    for graph in (modules, rooms):
        TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("oscine.cli", ("torch", "starlette", "zmq", "ctypes", "oscine.extensions.timing")),
        ("oscine.chat.harmony", ("torch", "starlette", "zmq")),
        ("oscine.api.app", ("torch", "triton", "transformers")),
        ("oscine", ("torch", "zmq", "msgspec", "asyncio")),
        ("oscine.llm", ("torch", "starlette", "uvicorn", "httpx", "triton", "transformers")),
        pytest.param(
            *("oscine.extensions.tools.builtin", ("torch", "httpx2", "mcp", "starlette", "yaml")),
            marks=pytest.mark.needs("tools"),
        ),
        ("oscine.engine.process.client", ("torch", "triton", "starlette")),
        ("oscine.engine.core.loop", ("torch", "numpy", "zmq", "msgspec")),
        ("oscine.executor.kv.fit", ("torch", "triton")),
        pytest.param("oscine.extensions.timing.layout", ("torch", "numpy"), marks=pytest.mark.needs("timing")),
        pytest.param(
            *("oscine.extensions.plan.fleet.simulation", ("torch", "triton", "ray", "starlette", "uvicorn")),
            marks=pytest.mark.needs("plan"),
        ),
        ("oscine.executor.start.fit", ("triton", "zmq", "starlette")),
        ("oscine.executor.runner", ("zmq", "msgspec", "starlette", "uvicorn", "llguidance")),
        pytest.param(
            "oscine.extensions.bench.serve.run",
            ("torch", "matplotlib", "zmq", "msgspec", "starlette", "uvicorn", "httpx"),
            marks=pytest.mark.needs("bench"),
        ),
        pytest.param(
            *("oscine.extensions.bench.engine", ("zmq", "msgspec", "starlette", "uvicorn", "llguidance")),
            marks=pytest.mark.needs("bench"),
        ),
    ],
)
def test_an_import_loads_nothing_it_should_not(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; sys.exit(', '.join(m for m in {absent!r} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


COLLECT = """
import sys
import pytest
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))  # importing None fails like importing a missing package
sys.exit(pytest.main(["--collect-only", "-q", "-p", "pytest_timeout", "-m", "gpu or hopper or multi_gpu", sys.argv[2]]))
"""
LACKING = (  # on a machine that only measures kernels
    *("gguf", "msgspec", "llguidance", "zmq", "starlette", "uvicorn", "httpx", "openai_harmony", "openai", "anthropic"),
    *("prometheus_client", "ollama", "mcp", "ray", "jsonschema", "playwright", "schemathesis", "matplotlib"),
)


@pytest.mark.slow  # imports all tests of a folder
@pytest.mark.parametrize("folder", ["ops", "model", "executor"])
def test_tests_for_gpus_are_found_without_the_packages_of_a_server(folder: str) -> None:
    command = [sys.executable, "-c", COLLECT, ",".join(LACKING), str(ROOT / "tests" / folder)]
    own = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins import some of these packages
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_embedded_model_fits_its_budget() -> None:
    files = [p for p in (ROOT / "oscine" / "model" / "nano").iterdir() if p.is_file()]
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {p.name for p in files}
    assert sum(p.stat().st_size for p in files) <= NANO_BYTES


PORT_OF_A_SOCKET = re.compile(r"(?:int|str)?\(?\w+\.getsockname\(\)\[1\]\)?")


def chosen_ports(tree: ast.AST) -> Iterator[int]:
    """Lines that choose a port: a number in a command line, or the port of a socket that is closed before its use."""
    for node in ast.walk(tree):
        match node:
            case ast.List(elts=words) | ast.Tuple(elts=words) | ast.Call(args=words):
                texts = [str(word.value) if isinstance(word, ast.Constant) else "" for word in words]
                for flag, port in pairwise(texts):
                    if flag.endswith("-port") and port.isdecimal() and 0 < int(port) < 1 << 16:
                        yield node.lineno
            case ast.With(body=[*_, ast.Assign(value=value) | ast.Return(value=ast.expr() as value)]):
                if PORT_OF_A_SOCKET.fullmatch(ast.unparse(value)):
                    yield value.lineno


@pytest.mark.long
def test_servers_choose_their_ports() -> None:
    """A free port may be taken before a server binds it. Use port 0, --port-file, or tests/kept_port.py."""
    files = [path for room in ("tests", "benchmarks", "training") for path in (ROOT / room).rglob("*.py")]
    assert not [f"{path}:{line}" for path in files for line in chosen_ports(ast.parse(path.read_text()))]


@pytest.mark.parametrize(
    "text",
    [
        'run("serve", "--port", "8000")',
        'command = [*serve, "--http-port", "8000"]',
        "with socket.create_server(('', 0)) as free:\n    port = str(free.getsockname()[1])\nserve(port)",
        "def f():\n    with socket.socket() as s:\n        s.bind(('', 0))\n        return int(s.getsockname()[1])",
    ],
)
def test_a_port_that_is_chosen_is_found(text: str) -> None:
    assert list(chosen_ports(ast.parse(text)))
