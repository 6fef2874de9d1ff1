"""Rules of the repository that no linter holds: sizes, rooms, what an import may load, what is shipped."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "oscine").rglob("*.py"))
MODULES = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in SOURCES}
ROOMS = sorted({p.parent for p in SOURCES})
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
    modules: dict[str, set[str]] = {}
    rooms: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if is_door(path):
            continue
        modules[name] = {other for other in imported(path) if not is_door(MODULES[other])}
        room = name.rpartition(".")[0]
        rooms.setdefault(room, set()).update(other.rpartition(".")[0] for other in modules[name])
        rooms[room].discard(room)
    for graph in (modules, rooms):
        TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("oscine.cli", ("torch", "starlette", "zmq")),
        ("oscine.chat.harmony", ("torch", "starlette", "zmq")),
        ("oscine.api.app", ("torch", "triton", "transformers")),
        ("oscine", ("torch", "zmq", "msgspec", "asyncio")),
        ("oscine.llm", ("torch", "starlette", "uvicorn", "httpx", "triton", "transformers")),
        ("oscine.tools.builtin", ("torch", "mcp", "starlette", "yaml")),
        ("oscine.engine.process.client", ("torch", "triton", "starlette")),
        ("oscine.engine.core.loop", ("torch", "numpy", "zmq", "msgspec")),
        ("oscine.executor.start.fit", ("triton", "zmq", "starlette")),
        ("oscine.executor.runner", ("zmq", "msgspec", "starlette", "uvicorn", "llguidance")),
        ("oscine.bench.serve.run", ("torch", "matplotlib", "zmq", "msgspec", "starlette", "uvicorn", "httpx")),
        ("oscine.bench.engine", ("zmq", "msgspec", "starlette", "uvicorn", "llguidance")),
    ],
)
def test_an_import_loads_nothing_it_should_not(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; sys.exit(', '.join(m for m in {absent!r} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_embedded_model_fits_its_budget() -> None:
    files = [p for p in (ROOT / "oscine" / "model" / "nano").iterdir() if p.is_file()]
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {p.name for p in files}
    assert sum(p.stat().st_size for p in files) <= NANO_BYTES
