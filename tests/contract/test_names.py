"""What code, settings and documents name exists: modules, what is bound in them, and files."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from tests.test_repository import MODULES, ROOT

NAME = re.compile(r"(?<![\w./@:-])oscine(?:\.(?:[A-Za-z_]\w*|\*))+(?::[A-Za-z_]\w*)?")
IMPORT = re.compile(r"\bfrom (oscine[\w.]*) import (?:\(([^)]*)\)|([\w, ]+))")
PATH = re.compile(r"(?<![\w./-])oscine/[\w./*-]*[\w*]")
FOLDERS = (".ci", "benchmarks", "deploy", "docs", "examples", "oscine", "tests", "training")
KINDS = (".py", ".pyi", ".toml", ".yaml", ".yml", ".md", ".ipynb", ".tpl")
OTHERS = {
    "attributes of spans, named in extensions/tracing/spans.py": (
        *("oscine.api_key", "oscine.known_tokens", "oscine.replica", "oscine.replica.from", "oscine.replica.to"),
        *("oscine.request_id", "oscine.router.overlap_tokens", "oscine.router.queue_s", "oscine.transfer.bytes"),
        *("oscine.transfer.full_pages", "oscine.transfer.sliding_pages", "oscine.transfer.transport"),
    ),
    "loggers": ("oscine.requests", "oscine.x"),
    "keys of an ASGI scope": (
        "oscine.batch",
        "oscine.busy",
        "oscine.held",
        "oscine.inside",
        "oscine.key",
        "oscine.within",
    ),
    "templates of the Helm chart": ("oscine.labels", "oscine.selector", "oscine.target"),
    "files": ("oscine.h", "oscine.json", "oscine.lock"),
    "a host of Kubernetes": ("oscine.default.svc.cluster.local",),
    "a variable in JavaScript": ("oscine.responses",),
    "groups of entry points": ("oscine.apis", "oscine.commands", "oscine.formats", "oscine.tools"),
    "a model": ("oscine/oscine-nano",),
    "missing on purpose, in tests": (
        "oscine.nowhere",
        "oscine.settings.config.Nothing",
        "oscine.cli.parser:nothing",
        "oscine.*.x",
        "oscine.extensions.x",
        "oscine.extensions.deleted.inner.command:arguments",
        "oscine.extensions.x.y",
    ),
}


def texts() -> Iterator[tuple[Path, str]]:
    for path in (*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))):
        if (path.suffix in KINDS or path.name in ("Makefile", "Containerfile")) and "node_modules" not in path.parts:
            yield path, path.read_text()


def names(text: str) -> Iterator[str]:
    yield from (*NAME.findall(text), *PATH.findall(text))
    for module, several, one in IMPORT.findall(text):
        for line in (several or one).splitlines():
            named = (part.split(" as ")[0].strip() for part in line.partition("#")[0].split(","))
            yield from (f"{module}.{name}" for name in named if name)


def resolves(name: str) -> bool:
    """Whether it is a file, a module, or bound in a module or in a class there. `*` stands for any text."""
    if "/" in name:
        return any(ROOT.glob(name))
    if "*" in name:
        return any(fnmatch(module, name) for module in MODULES)
    module, inner = name.replace(":", "."), [""]
    while module not in MODULES:
        module, _, last = module.rpartition(".")
        inner.insert(0, last)
    outer, *inner = inner
    found = contents(module)
    return not outer or (outer in found and inner[0] in (found[outer] or inner))


@cache
def contents(module: str) -> dict[str, set[str] | None]:
    """The names that a module binds. Of a class also those in it."""
    path = MODULES[module]
    sources = [path, *path.parent.glob("__init__.pyi")] if path.stem == "__init__" else [path]
    bound = {name: node for source in sources for name, node in bindings(ast.parse(source.read_text()))}
    of_classes = {name: {"", *dict(bindings(of))} for name, of in bound.items() if isinstance(of, ast.ClassDef)}
    return dict.fromkeys((*bound, "__file__")) | of_classes


def bindings(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, child
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((alias.asname or alias.name.partition(".")[0], child) for alias in aliases)
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, child
            case _:
                yield from bindings(child)


@pytest.mark.long
def test_dotted_names_exist() -> None:
    known = {name for group in OTHERS.values() for name in group}
    places: dict[str, list[str]] = {}
    for path, text in texts():
        for name in set(names(text)):
            places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    missing = [f"{name} in {', '.join(where)}" for name, where in places.items() if not resolves(name)]
    assert not [line for line in missing if line.partition(" ")[0] not in known]
    assert known <= places.keys(), "exceptions that nothing needs"


def test_names_that_do_not_exist_are_found() -> None:
    found = (
        "oscine.cli.parser:Parser",
        "oscine.settings.option.Option.read",
        "oscine.LLM",
        "oscine.*.parser",
        "oscine/*.py",
    )
    assert all(map(resolves, found))
    (*_, missing) = OTHERS.values()
    assert not any(map(resolves, missing))
