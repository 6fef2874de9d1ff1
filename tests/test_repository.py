"""Rules of the repository that no linter holds: size budgets, what an import may load, what is shipped."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(p for p in (ROOT / "oscine").rglob("*.py"))
FILE_LINES = 400
FUNCTION_LINES = 60
NANO_BYTES = 12_000_000


def is_kernel(path: Path) -> bool:
    return "ops" in path.relative_to(ROOT).parts


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_holds_one_noun_in_a_readable_length(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= (2 * FILE_LINES if is_kernel(path) else FILE_LINES)
    if is_kernel(path):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < FUNCTION_LINES, f"{node.name} is too long"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("oscine.cli", ("torch", "starlette", "zmq")),
        ("oscine.chat.harmony", ("torch", "starlette", "zmq")),
        ("oscine.api.app", ("torch", "triton", "transformers")),
        ("oscine.tools.builtin", ("torch", "mcp", "starlette", "yaml")),
        ("oscine.engine.process.client", ("torch", "triton", "starlette")),
        ("oscine.engine.core.loop", ("torch", "numpy", "zmq", "msgspec")),
        ("oscine.executor.runner", ("zmq", "msgspec", "starlette", "uvicorn", "llguidance")),
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
