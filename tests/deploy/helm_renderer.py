"""Renders the part of Helm's templates that our chart uses: if, with, range, define, include, and a few functions.

It is for tests on machines without Helm. It raises ValueError for all else, so the chart cannot outgrow it unnoticed.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_ACTION = re.compile(r"\s*{{-\s*(.*?)\s*(-)?}}|{{\s*(.*?)\s*(-)?}}", re.DOTALL)
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\||\S+')
_BLOCKS = ("if", "with", "range", "define")


@dataclass
class _Block:
    """An action with what lies between it and its end; `other` follows its else."""

    kind: str
    argument: str
    body: list["str | _Block"] = field(default_factory=list)
    other: list["str | _Block"] = field(default_factory=list)


def _tokens(text: str) -> Iterator[tuple[str, bool]]:
    """Pieces of the text, and whether each is an action. Trim marks have taken their spaces away."""
    end, trim = 0, False
    for match in _ACTION.finditer(text):
        before = text[end : match.start()]
        yield (before.lstrip() if trim else before), False
        yield match[1] if match[1] is not None else match[3], True
        end, trim = match.end(), bool(match[2] or match[4])
    yield (text[end:].lstrip() if trim else text[end:]), False


def _parse(text: str) -> list["str | _Block"]:
    root = _Block("root", "")
    stack, into = [root], root.body
    for piece, is_action in _tokens(text):
        if not is_action:
            into.append(piece)
            continue
        kind, _, argument = piece.partition(" ")
        if kind in _BLOCKS:
            stack.append(_Block(kind, argument.strip()))
            into.append(stack[-1])
            into = stack[-1].body
        elif piece == "else":
            into = stack[-1].other
        elif piece == "end":
            stack.pop()
            into = stack[-1].other or stack[-1].body
        else:
            into.append(_Block("value", piece))
    if len(stack) != 1:
        raise ValueError(f"{stack[-1].kind} has no end")
    return root.body


class Chart:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = yaml.safe_load((folder / "Chart.yaml").read_text())
        self._defined: dict[str, list[str | _Block]] = {}
        for block in _parse((folder / "templates" / "_helpers.tpl").read_text()):
            if isinstance(block, _Block):
                self._defined[json.loads(block.argument)] = block.body
        self._functions: dict[str, Callable[..., Any]] = {
            "add": lambda *numbers: sum(numbers),
            "include": lambda name, dot: self._render(self._defined[name], dot),
            "nindent": lambda width, text: "\n" + "\n".join(" " * width + line for line in text.splitlines()),
            "not": lambda value: not value,
            "or": lambda *values: next(filter(None, values), values[-1]),
            "printf": lambda form, *values: form % values,
            "quote": lambda value: json.dumps(str(value)),
            "toYaml": lambda value: yaml.safe_dump(value, default_flow_style=False).rstrip(),
        }

    @property
    def values(self) -> dict[str, Any]:
        return dict(yaml.safe_load((self.folder / "values.yaml").read_text()))

    def render(self, release: str, values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """The objects of all templates. `values` replace the chart's, level by level."""
        dot = {
            "Values": _merged(self.values, values or {}),
            "Release": {"Name": release, "Namespace": "default", "Service": "Helm"},
            "Chart": {name[0].upper() + name[1:]: value for name, value in self.facts.items()},
        }
        files = sorted((self.folder / "templates").glob("*.yaml"))
        texts = (self._render(_parse(file.read_text()), dot) for file in files)
        return [found for text in texts for found in yaml.safe_load_all(text) if found]

    def notes(self, release: str) -> str:
        dot = {"Values": self.values, "Release": {"Name": release, "Namespace": "default"}}
        return self._render(_parse((self.folder / "templates" / "NOTES.txt").read_text()), dot)

    def _render(self, parts: list["str | _Block"], dot: Any) -> str:
        return "".join(part if isinstance(part, str) else self._render_block(part, dot) for part in parts)

    def _render_block(self, block: _Block, dot: Any) -> str:
        value = self._evaluate(block.argument, dot)
        if block.kind == "value":
            return str(value)
        if block.kind == "range":
            return "".join(self._render(block.body, item) for item in value)
        if not value:
            return self._render(block.other, dot)
        return self._render(block.body, value if block.kind == "with" else dot)

    def _evaluate(self, expression: str, dot: Any) -> Any:
        piped: list[Any] = []
        words: list[str] = []
        for word in [*_WORD.findall(expression), "|"]:
            if word != "|":
                words.append(word)
                continue
            piped = [self._call(words, dot, piped)]
            words = []
        return piped[0]

    def _call(self, words: list[str], dot: Any, piped: list[Any]) -> Any:
        name, *rest = words
        if name in self._functions:
            return self._functions[name](*(_operand(word, dot) for word in rest), *piped)
        if rest or piped:
            raise ValueError(f"unknown function {name}")
        return _operand(name, dot)


def _operand(word: str, dot: Any) -> Any:
    if not word.startswith("."):
        return json.loads(word)
    for name in filter(None, word.split(".")):
        if name not in dot:
            raise ValueError(f"no value {word}")
        dot = dot[name]
    return dot


def _merged(ours: Any, given: Any) -> Any:
    if not isinstance(ours, dict) or not isinstance(given, dict):
        return given
    return ours | {name: _merged(ours.get(name), value) for name, value in given.items()}
