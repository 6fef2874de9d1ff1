"""The nucleus shall import no extension, and extensions import each other one way."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter

import pytest

from oscine.system.extensions import NEEDS, extension_of
from tests.test_repository import ALIASES, MODULES

# Edges from the nucleus to extensions, by where the import is. A text with the path of a module counts as one.
LEFT = {"at the top": 0, "in a function": 0, "for types": 0, "as text": 0}
# Modules with the table of a seam, whose texts do not count
TABLES = (
    "oscine.api.apis",
    "oscine.api.serving.placement",
    "oscine.api.serving.tools",
    "oscine.api.telemetry.traces",
    "oscine.checkpoint.formats",
    "oscine.cli.commands",
    "oscine.cli.serve.options",
    "oscine.cli.serve.read_options",
    "oscine.engine.build",
    "oscine.engine.process.server",
    "oscine.executor.start.parts",
    "oscine.ops.platforms.table",
)


def imports(node: ast.AST, place: str = "at the top") -> Iterator[tuple[str, str]]:
    """Modules of Oscine that are imported or named, and where."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ImportFrom(module=str(module), names=aliases):
                inner = {f"{module}.{alias.name}" for alias in aliases} & MODULES.keys()
                yield from ((name, place) for name in inner or {module} & MODULES.keys())
            case ast.Import(names=aliases):
                yield from ((alias.name, place) for alias in aliases if alias.name in MODULES)
            case ast.Constant(value=str(text)) if text.partition(":")[0] in MODULES:
                yield text.partition(":")[0], "as text"
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from imports(child, "in a function")
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from imports(child, "for types")
            case _:
                yield from imports(child, place)


@pytest.mark.long
def test_the_nucleus_imports_ever_fewer_extensions() -> None:
    edges: defaultdict[str, set[str]] = defaultdict(set)
    for module, path in MODULES.items():
        if not extension_of(module) and module not in ALIASES:
            for other, place in imports(ast.parse(path.read_text())):
                if (extension := extension_of(other)) and not (place == "as text" and module in TABLES):
                    edges[place].add(f"{module} -> {other} ({extension})")
    found = {place: len(edges[place]) for place in LEFT}
    listed = "\n".join(f"{place}: {edge}" for place in LEFT for edge in sorted(edges[place]))
    assert found == LEFT, f"{found}; a number may only fall, and is then written into LEFT:\n{listed}"


@pytest.mark.long
def test_extensions_import_the_extensions_that_they_need() -> None:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for module, path in MODULES.items():
        if extension := extension_of(module):
            others = {extension_of(other) for other, _ in imports(ast.parse(path.read_text()))}
            found[extension] |= others - {"", extension}
    assert {extension: tuple(sorted(others)) for extension, others in found.items() if others} == NEEDS
    TopologicalSorter(NEEDS).prepare()  # raises CycleError


def test_places_of_imports_are_told_apart() -> None:
    code = (
        "import oscine.types\nfrom oscine.settings import option\n"
        "if TYPE_CHECKING:\n    from oscine.settings.config import Config\n"
        "def f():\n    from oscine.cli import parser\n"
        "    g('oscine.settings.validators:is_hex', 'about oscine.settings.validators')"
    )
    assert [(name.removeprefix("oscine."), place) for name, place in imports(ast.parse(code))] == [
        *(("types", "at the top"), ("settings.option", "at the top"), ("settings.config", "for types")),
        *(("cli.parser", "in a function"), ("settings.validators", "as text")),
    ]
    assert [*map(extension_of, ("oscine.engine.build", "oscine.extensions", "oscine.extensions.x.y"))] == [
        "",
        "",
        "x",
    ]
