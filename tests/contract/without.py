"""The package without some of its extensions, and without those that need them.

    python -m tests.contract.without NAME ...      each alone; all of them, and then none, if none is named

For each it imports every module that is left, runs `oscine --help`, and gets an answer of the embedded model. This is
done in a copy of the package, as nothing but the folders of the extensions is missing in it.
"""

import importlib
import io
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Collection, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from oscine.system.extensions import NEEDS, extension_of
from tests.test_repository import MODULES, ROOT

# A command without its extension, and what it says
MISSING = {
    "apis": ("serve oscine-nano --port 0 --files-dir DIR", "--files-dir needs the extension apis"),
    "file_search": (
        "serve oscine-nano --port 0 --embeddings-url http://127.0.0.1:1/v1 --embeddings-model m",
        "--embeddings-url needs the extension file_search",
    ),
    "experts_on_host": (
        "serve oscine-nano --port 0 --experts-on-host 2",
        "--experts-on-host needs the extension experts_on_host",
    ),
    "calibration": (
        "calibrate oscine-nano --prompts FILE",
        "oscine calibrate needs the extension calibration",
    ),
    "eval": ("eval URL", "oscine eval needs the extension eval"),
    "verify": ("verify oscine-nano", "oscine verify needs the extension verify"),
    "offload": (
        "serve oscine-nano --port 0 --kv-offload-bytes 1GiB",
        "--kv-offload-bytes needs the extension offload",
    ),
    "parallel": (
        "serve oscine-nano --port 0 --tensor-parallel-size 2",
        "--tensor-parallel-size needs the extension parallel",
    ),
    "speculation": (
        'serve oscine-nano --port 0 --speculative-config {"method":"ngram"}',
        "argument --speculative-config: it needs the extension speculation (see oscine serve --help)",
    ),
    "kv_events": (
        'serve oscine-nano --port 0 --kv-events-config {"enable_kv_cache_events":true}',
        "argument --kv-events-config: it needs the extension kv_events (see oscine serve --help)",
    ),
    "terminal": ("chat", "oscine chat needs the extension terminal"),
    "formats": ("pull gpt-oss-20b", "oscine pull needs the extension formats"),
    "replicas": (
        "serve oscine-nano --port 0 --data-parallel-size 2",
        "--data-parallel-size above 1 needs the extension replicas",
    ),
    "tools": ("serve oscine-nano --port 0 --tools python", "--tools needs the extension tools"),
}
QUESTION, ANSWER = "What is 27 + 58?", "85"
# Imported once, for all children. They import nothing of Oscine.
OTHERS = (
    *("torch", "numpy", "triton", "msgspec", "zmq", "starlette.applications", "uvicorn", "httpx", "yaml"),
    *("prometheus_client", "tokenizers", "safetensors", "llguidance", "openai_harmony", "prompt_toolkit"),
)


def extensions() -> list[str]:
    return sorted({extension for module in MODULES if (extension := extension_of(module))})


def cases() -> list[list[str]]:
    """Each alone, and all at once."""
    return [*([one] for one in extensions()), extensions()]


def few_cases() -> list[list[str]]:
    """Fewer sets that find what `cases` finds: in one of them an extension is gone, and another that does not need it
    is there, for each two. At last all are gone."""
    names, found = extensions(), list[list[str]]()
    left = {pair for name in names for pair in _apart([name], names)}
    while left:
        gone: list[str] = []
        while more := {name: len(_apart([*gone, name], names) & left) for name in names}:
            name = max(names, key=more.__getitem__)
            if more[name] <= len(_apart(gone, names) & left):
                break
            gone.append(name)
        found.append(sorted(gone))
        left -= _apart(gone, names)
    return [*found, names]


def _apart(gone: Collection[str], names: Collection[str]) -> set[tuple[str, str]]:
    """Pairs of an extension that is gone then, and one that is there."""
    absent = without(gone)
    return {(one, other) for one in absent for other in names if other not in absent}


def without(gone: Collection[str]) -> set[str]:
    """All that are gone then."""
    found = {*gone}
    while more := {one for one, needs in NEEDS.items() if found & {*needs}} - found:
        found |= more
    return found


def copy_package(to: Path, gone: Collection[str] = ()) -> None:
    """Makes a folder for sys.path of an empty one: the package without these extensions.

    With what Python has compiled, which would take longer than all else. Another process may be writing such a file: it
    has another name until it is whole.
    """
    folder = ROOT / "oscine" / "extensions"

    def left_out(parent: str, names: list[str]) -> set[str]:
        is_compiled = Path(parent).name == "__pycache__"
        return {
            name
            for name in names
            if (is_compiled and not name.endswith(".pyc")) or (Path(parent) == folder and name in gone)
        }

    shutil.copytree(ROOT / "oscine", to / "oscine", ignore=left_out)


def check(folder: Path, gone: Collection[str]) -> None:
    """Raises whatever is wrong. In a process of its own, which has imported nothing of Oscine."""
    sys.path.insert(0, str(folder))
    for module in MODULES:
        if extension_of(module) in gone or module.endswith("__main__") or needs_another(module):
            continue
        importlib.import_module(module)
    from oscine.cli import main

    said = io.StringIO()
    with redirect_stdout(said):
        try:
            main(["--help"])
        except SystemExit as end:
            if end.code:
                raise
        if "terminal" in gone:
            from oscine import LLM

            with LLM() as llm:
                print(llm.chat([{"role": "user", "content": QUESTION}], temperature=0).content)
        else:
            assert main(["chat", "--temperature", "0", QUESTION]) == 0
    helped, _, answered = said.getvalue().partition("--version")
    assert helped.startswith("usage: oscine COMMAND")
    assert ANSWER in answered
    for extension in MISSING.keys() & gone:
        command, error = MISSING[extension]
        with redirect_stderr(said := io.StringIO()):
            assert main(command.split())
        assert said.getvalue() == f"oscine: error: {error}\n"


def needs_another(module: str) -> bool:
    """A package that is no dependency, or the old name of an extension."""
    return ".ray" in module or module.startswith(("oscine.extensions.dynamo.worker", "oscine.cli.cluster"))


def failure(gone: Collection[str]) -> str | None:
    """The trace of what fails without them; None if nothing does."""
    for name in OTHERS:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as trace:
        copy_package(Path(folder), gone)
        child = os.fork()
        if not child:
            status = 1
            try:
                for name in [name for name in sys.modules if name.partition(".")[0] == "oscine"]:
                    del sys.modules[name]
                check(Path(folder), gone)
                status = 0
            except BaseException:  # also SystemExit: it is told to the parent
                traceback.print_exc(file=trace)
                trace.flush()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        trace.seek(0)
        return None if not status else trace.read() or f"status {status}"


def main(names: Sequence[str]) -> int:
    if unknown := {*names} - {*extensions()}:
        print(f"there is no extension {', '.join(sorted(unknown))}: {', '.join(extensions())}", file=sys.stderr)
        return 2
    wrong = 0
    for gone in map(without, [[name] for name in names] or cases()):
        if (trace := failure(gone)) is not None:
            wrong += 1
            print(trace)
        print(f"without {', '.join(sorted(gone))}: {'as it should be' if trace is None else 'WRONG'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
