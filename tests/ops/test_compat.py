"""Kernels have one source for all releases of Triton: rules that hold whichever release is installed."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ops.chips import CHIPS

PACKAGE = Path(__file__).parents[2] / "oscine"
FOLDERS = (PACKAGE / "ops", PACKAGE / "extensions" / "speculation" / "ops")
SOURCES = [path for folder in FOLDERS for path in sorted(folder.rglob("*.py")) if "triton" in path.read_text()]
# Names that one release has and another lacks
DIFFERENT = (
    r"thread_barrier|gl\.barrier|async_copy_global_to_shared|tma\.async_load|\.?_?reinterpret\(|triton.*__version__"
)


def launches(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of the form kernel[grid](...)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            kernel = node.func.value
            if isinstance(kernel, ast.Name) and re.search("kernel|gemm", kernel.id):
                yield node


def sets_fp_fusion(launch: ast.Call) -> bool:
    """Itself, or by Target.launch_options, which go by these names."""
    given = {ast.unparse(keyword) for keyword in launch.keywords}
    return bool(given & {"enable_fp_fusion=True", "**target.launch_options", "**options", "**self._options"})


def test_launch_options_fuse_products_and_sums() -> None:
    assert all(target.launch_options["enable_fp_fusion"] is True for target in CHIPS.values())


def test_every_launch_sets_enable_fp_fusion() -> None:
    found = [(path, launch) for path in SOURCES for launch in launches(ast.parse(path.read_text()))]
    assert len(found) > 20
    assert [f"{path}:{launch.lineno}" for path, launch in found if not sets_fp_fusion(launch)] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_compat_has_the_names_that_differ_between_releases(path: Path) -> None:
    names = set(re.findall(DIFFERENT, path.read_text()))
    assert names <= {"reinterpret("} or path.name == "compat.py"
