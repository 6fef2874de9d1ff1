"""Completion scripts for bash, zsh and fish.

Each script first finds the command that stands on the line, then completes the value of the option before the cursor,
or the names of commands and options. Nothing of Oscine runs when a key is pressed.
"""

import shlex
from collections.abc import Iterable, Sequence

from oscine.extensions.completion.tree import Command, Value

_HEAD = "# Completion of `oscine` for {shell}, made by `oscine completion {shell}`."


def _quoted(words: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, words))


def _steps(commands: Sequence[Command]) -> str:
    """The patterns of a command's path so far and the word that leads on, for a `case` of bash or zsh."""
    pairs = [f"{command.path}|{name}" for command in commands for name in command.commands]
    return "|".join(map(shlex.quote, pairs))


def bash(commands: Sequence[Command]) -> str:
    lines = [
        _HEAD.format(shell="bash"),
        "_oscine() {",
        '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" at="" i',
        "  for ((i = 1; i < COMP_CWORD; i++)); do",
        '    case "$at|${COMP_WORDS[i]}" in',
        f'      {_steps(commands)}) at="${{at:+$at }}${{COMP_WORDS[i]}}" ;;',
        "    esac",
        "  done",
        "  COMPREPLY=()",
        '  case "$at|$prev" in',
    ]
    for command in commands:
        for name, value in command.values.items():
            lines.append(f"    {shlex.quote(f'{command.path}|{name}')}) {_bash_value(value)}; return ;;")
    lines += ["  esac", '  case "$at" in']
    for command in commands:
        lines += [
            f"    {shlex.quote(command.path)})",
            '      if [[ "$cur" == -* ]]; then',
            f"        {_bash_words(command.options)}",
            "      else",
            f"        {_bash_words(command.commands) if command.commands else _bash_value(command.positional)}",
            "      fi ;;",
        ]
    lines += ["  esac", "}", "complete -F _oscine oscine"]
    return "\n".join(lines) + "\n"


def _bash_words(words: Iterable[str]) -> str:
    return f'mapfile -t COMPREPLY < <(compgen -W {shlex.quote(" ".join(words))} -- "$cur")'


def _bash_value(value: Value) -> str:
    if value.kind == "choices":
        return _bash_words(value.words)
    if value.kind == "text":
        return ":"
    words = f"-W {shlex.quote(' '.join(value.words))} " if value.words else ""
    return f'compopt -o filenames 2> /dev/null; mapfile -t COMPREPLY < <(compgen {words}-f -- "$cur")'


def zsh(commands: Sequence[Command]) -> str:
    lines = [
        "#compdef oscine",
        _HEAD.format(shell="zsh"),
        "_oscine() {",
        '  local at="" i',
        "  local -a found",
        "  for ((i = 2; i < CURRENT; i++)); do",
        '    case "$at|$words[i]" in',
        f'      ({_steps(commands)}) at="${{at:+$at }}$words[i]" ;;',
        "    esac",
        "  done",
        '  case "$at|$words[CURRENT-1]" in',
    ]
    for command in commands:
        for name, value in command.values.items():
            lines.append(f"    ({shlex.quote(f'{command.path}|{name}')}) {_zsh_value(value)}; return ;;")
    lines += ["  esac", '  case "$at" in']
    for command in commands:
        lines += [
            f"    ({shlex.quote(command.path)})",
            '      if [[ "$words[CURRENT]" == -* ]]; then',
            f"        found=({_described(command.options)}); _describe -o option found",
            "      else",
            f"        found=({_described(command.commands)}); _describe command found"
            if command.commands
            else f"        {_zsh_value(command.positional)}",
            "      fi ;;",
        ]
    lines += ["  esac", "}", 'if [ "$funcstack[1]" = "_oscine" ]; then _oscine "$@"; else compdef _oscine oscine; fi']
    return "\n".join(lines) + "\n"


def _described(words: dict[str, str]) -> str:
    return _quoted(f"{name}:{text}" for name, text in words.items())


def _zsh_value(value: Value) -> str:
    if value.kind == "text":
        return ":"
    words = f"compadd -- {_quoted(value.words)}" if value.words else ""
    return "; ".join(filter(None, (words, "_files" if value.kind == "files" else "")))


def fish(commands: Sequence[Command]) -> str:
    steps = _quoted(f"{command.path}|{name}" for command in commands for name in command.commands)
    lines = [
        _HEAD.format(shell="fish"),
        "function __oscine_at",
        '    set -l at ""',
        "    for word in (commandline -opc)[2..-1]",
        f'        if contains -- "$at|$word" {steps}',
        '            set at (string trim "$at $word")',
        "        end",
        "    end",
        '    test "$at" = "$argv[1]"',
        "end",
        "complete -c oscine -f",
    ]
    for command in commands:
        here = f"complete -c oscine -n {_fish(f'__oscine_at {_fish(command.path)}')}"
        lines += [f"{here} -a {_fish(name)} -d {_fish(text)}" for name, text in command.commands.items()]
        if not command.commands and command.positional.kind != "text":
            lines.append(f"{here}{_fish_value(command.positional).replace(' -r', '')}")
        for name, text in command.options.items():
            kind = "-l" if name.startswith("--") else "-s"
            lines.append(f"{here} {kind} {name.lstrip('-')} -d {_fish(text)}{_fish_value(command.values.get(name))}")
    return "\n".join(lines) + "\n"


def _fish(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _fish_value(value: Value | None) -> str:
    if value is None:
        return ""
    words = f" -a {_fish(' '.join(value.words))}" if value.words else ""
    return (" -r -F" if value.kind == "files" else " -x") + words


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
