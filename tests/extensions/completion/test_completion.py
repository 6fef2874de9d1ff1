"""Completion scripts, run by the shells themselves. zsh and fish are not on every machine."""

import shutil
import subprocess
from pathlib import Path

import pytest

from oscine.cli import whole_parser
from oscine.extensions.completion.shells import SHELLS
from oscine.extensions.completion.tree import Command, commands_of

COMMANDS = [*commands_of(whole_parser())]
BASH = 'COMP_WORDS=(%s); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _oscine; printf "%%s\\n" "${COMPREPLY[@]}"'
# The parts of zsh's completion system that the script calls, as far as the offered words go.
ZSH = """
compdef() { : }
_describe() { [[ $1 == -o ]] && shift; print -rl -- "${(@)${(@P)2}%%:*}" }
compadd() { shift; print -rl -- "$@" }
_files() { print -rl -- *(N) }
source SCRIPT; words=(WORDS); CURRENT=$#words; _oscine
"""


def offered(shell: str, line: str, folder: Path) -> set[str]:
    """The words that a shell offers at the end of a line; zsh filters them itself, so this does it here."""
    script = folder / "script"
    if not script.exists():
        script.write_text(SHELLS[shell](COMMANDS))
    words = " ".join(word or "''" for word in line.split(" "))
    if shell == "bash":
        command = ["bash", "--norc", "-c", f"source {script}; " + BASH % words]
    elif shell == "zsh":
        command = ["zsh", "-f", "-c", ZSH.replace("SCRIPT", str(script)).replace("WORDS", words)]
    else:
        command = ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, cwd=folder)
    assert not done.stderr
    found = {text.split("\t")[0] for text in done.stdout.splitlines()} - {""}
    return {word for word in found if word.startswith(line.rpartition(" ")[2])}


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


def test_a_shell_completes_commands_options_and_values(shell: str, tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").touch()
    cases = {
        "oscine ser": {"serve"},
        "oscine serve --dty": {"--dtype"},
        "oscine serve --dtype ": {"auto", "float32", "bfloat16"},
        "oscine serve --profile low": {"low_latency"},
        "oscine serve gpt": {"gpt-oss-20b", "gpt-oss-120b"},
        "oscine serve --config ser": {"serve.yaml"},
        "oscine serve --port ": set(),
        "oscine bench ": {"engine", "ops", "serve", "sweep"},
        "oscine bench serve --concur": {"--concurrency"},
        "oscine serve --concur": set(),
        "oscine completion ": {"bash", "zsh", "fish"},
    }
    for line, expected in cases.items():
        assert offered(shell, line, tmp_path) == expected, line


def test_every_command_is_there_and_hidden_names_are_not() -> None:
    by_path: dict[str, Command] = {command.path: command for command in COMMANDS}
    assert {"", "serve", "bench serve", "cluster up", "list-model-profiles", "completion"} <= by_path.keys()
    serve = by_path["serve"]
    assert "--max-model-len" in serve.options
    assert "--max-seq-len" not in serve.options  # another server's name
    assert serve.values["--log-level"].words == ("debug", "info", "warning", "error")
    assert "--no-playground" not in serve.values
    for command in COMMANDS:
        assert command.values.keys() <= command.options.keys()
        assert all(text for text in (command.options | command.commands).values()), command.path
