"""The nucleus shall import no extension. Until all modules have moved, such imports may only become fewer."""

import ast
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.test_repository import MODULES

# extension -> modules and folders of today that move into it; a folder's row also holds what is below it. Without a row
# a module stays in the nucleus. The longest row counts. A row whose module has moved is deleted.
MOVES = {
    "apis": "api.anthropic api.batches api.conventions api.ollama api.responses api.serving.reasoning_memory cli.batch "
    "cli.machine.nim cli.serve.nim_variables",
    "tools": "tools",
    "parallel": "engine.process.together executor.lockstep executor.parallel executor.start.communicator "
    "executor.start.rank executor.start.ranks executor.start.share",
    "speculation": "checkpoint.head cli.serve.speculative_config engine.core.speculation executor.drafts "
    "executor.heads model.eagle ops.draft",
    "offload": "engine.offload executor.kv.page_files executor.kv.page_memory executor.kv.page_store "
    "executor.start.page_store",
    "disaggregation": "engine.peers executor.kv.copies executor.kv.nixl_transfer executor.kv.transfers "
    "executor.parallel.transfers executor.start.transfer",
    "replicas": "cluster.client cluster.data_parallel cluster.routing cluster.spec",
    "cluster": "cli.cluster cluster.ray cluster.scaling cluster.spec.deployment",
    "formats": "checkpoint.convert checkpoint.gguf checkpoint.installed checkpoint.lora checkpoint.ollama cli.models",
    "dynamo": "cli.serve.dynamo_worker dynamo",
    "bench": "bench cli.bench",
    "eval": "cli.eval eval",
    "doctor": "cli.machine",
    "completion": "cli.completion",
    "": "engine.peers.kv_events executor.drafts.drafter tools.toolbox",  # seams: these stay in the nucleus
}
ROWS = {f"oscine.{row}": extension for extension, rows in MOVES.items() for row in rows.split()}

# Edges from the nucleus to extensions, by where the import is. A text with the path of a module counts as one.
LEFT = {"at the top": 74, "in a function": 9, "for types": 2, "as text": 0}
TABLES: tuple[str, ...] = ()  # modules with the table of a seam, whose texts do not count


def extension_of(module: str) -> str:
    """Empty for the nucleus."""
    parts = module.split(".")
    if parts[1:2] == ["extensions"]:
        return parts[2] if len(parts) > 2 else ""
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((ROWS[prefix] for prefix in prefixes if prefix in ROWS), "")


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
    assert not [row for row in ROWS if row not in MODULES], "rows of modules that have moved"
    edges: defaultdict[str, set[str]] = defaultdict(set)
    for module, path in MODULES.items():
        if not extension_of(module):
            for other, place in imports(ast.parse(path.read_text())):
                if (extension := extension_of(other)) and not (place == "as text" and module in TABLES):
                    edges[place].add(f"{module} -> {other} ({extension})")
    found = {place: len(edges[place]) for place in LEFT}
    listed = "\n".join(f"{place}: {edge}" for place in LEFT for edge in sorted(edges[place]))
    assert found == LEFT, f"{found}; a number may only fall, and is then written into LEFT:\n{listed}"


def test_places_of_imports_are_told_apart() -> None:
    code = (
        "import oscine.types\nfrom oscine import option\nif TYPE_CHECKING:\n    from oscine.settings.config import Config\n"
        "def f():\n    from oscine.cli import parser\n    g('oscine.settings.texts:is_hex', 'about oscine.settings.texts')"
    )
    assert [(name.removeprefix("oscine."), place) for name, place in imports(ast.parse(code))] == [
        *(("types", "at the top"), ("option", "at the top"), ("config", "for types")),
        *(("cli.parser", "in a function"), ("texts", "as text")),
    ]
    names = ("oscine.engine.kv_events", "oscine.engine.peers", "oscine.extensions.x")
    assert [*map(extension_of, names)] == ["", "disaggregation", "x"]
