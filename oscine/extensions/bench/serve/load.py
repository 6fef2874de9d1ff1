"""Workloads: random lengths, shared prefixes, sessions of several turns, and files of requests."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from oscine.extensions.bench.serve.words import Words

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: Prompt | None  # None: `parameters` hold the messages
    max_tokens: int
    parameters: dict[str, Any] = field(default_factory=dict)  # of the request's body; they override all others


Session = tuple[Turn, ...]  # each turn follows the answer to the one before it


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens, each uniform between (1 - spread) and (1 + spread) times its mean."""

    isl: int
    osl: int
    spread: float = 0.0

    def draw(self, random: np.random.Generator) -> tuple[int, int]:
        """Random lengths in tokens: of a prompt and of its answer."""
        return self._draw(random, self.isl), self._draw(random, self.osl)

    def _draw(self, random: np.random.Generator, mean: int) -> int:
        low, high = (max(1, round(mean * factor)) for factor in (1 - self.spread, 1 + self.spread))
        return int(random.integers(low, high, endpoint=True))


@dataclass(frozen=True, slots=True)
class Shapes:
    """Random sessions without their words. The shared prefix is part of the first prompt, beyond its length."""

    lengths: Lengths
    turns: int = 1
    prefix_tokens: int = 0
    num_prefixes: int = 1
    seed: int = 0

    def draw(self) -> Iterator[tuple[int | None, list[tuple[int, int]]]]:
        """Of each session: the place of its prefix among num_prefixes, and tokens of prompts and answers."""
        random = np.random.default_rng(self.seed)
        while True:
            lengths, prefix = [self.lengths.draw(random)], None
            if self.prefix_tokens:
                prefix = int(random.integers(self.num_prefixes))
            lengths += [self.lengths.draw(random) for _ in range(1, self.turns)]
            yield prefix, lengths


@dataclass(frozen=True, slots=True)
class RandomLoad:
    """Sessions of random words."""

    words: Words
    shapes: Shapes
    as_ids: bool = False  # prompts are token ids

    def sessions(self) -> Iterator[Session]:
        shapes = self.shapes
        prefixes = [self._prompt(shapes.prefix_tokens) for _ in range(shapes.num_prefixes)]
        for prefix, lengths in shapes.draw():
            turns = [Turn(self._prompt(isl), osl) for isl, osl in lengths]
            if prefix is not None:
                turns[0] = replace(turns[0], prompt=_joined(prefixes[prefix], turns[0].prompt))
            yield tuple(turns)

    def _prompt(self, num_tokens: int) -> Prompt:
        return self.words.ids(num_tokens) if self.as_ids else self.words.text(num_tokens)


def _joined(prefix: Prompt, prompt: Prompt | None) -> Prompt:
    if isinstance(prefix, str):
        return f"{prefix} {prompt}"
    assert isinstance(prompt, list)
    return prefix + prompt


@dataclass(frozen=True, slots=True)
class FileLoad:
    """Sessions of a JSONL file, from the top again when it ends.

    A line is the body of a request (with `prompt` or `messages`), a line of OpenAI's batch format, or `turns`: a list
    of texts that are said one after the other. Other keys become parameters of the requests.
    """

    path: Path
    osl: int  # the most generated tokens for lines without max_tokens

    def sessions(self) -> Iterator[Session]:
        """Raises ValueError that names the line, and OSError."""
        lines = self.path.read_bytes().splitlines()
        found = [self._session(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if not found:
            raise ValueError(f"{self.path} has no requests")
        return itertools.cycle(found)

    def _session(self, number: int, line: bytes) -> Session:
        try:
            body = dict(json.loads(line))
            body = dict(body.get("body", body))
            limits = [body.pop(name, None) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")]
            osl = next((int(limit) for limit in limits if limit), self.osl)
            body = {key: value for key, value in body.items() if key not in ("model", "stream", "stream_options")}
            prompts = body.pop("turns", None) or [body.pop("prompt", None)]
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path}:{number}: not a request: {error}") from None
        if prompts[0] is None and "messages" not in body and "input" not in body:
            raise ValueError(f"{self.path}:{number}: it has neither prompt, messages, input nor turns")
        return tuple(Turn(prompt, osl, body) for prompt in prompts)
