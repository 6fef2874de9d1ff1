"""Workloads: random lengths, shared prefixes, sessions of several turns, files of requests, and traces."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oscine.extensions.bench.serve.words import Words

Prompt = str | list[int]
BLOCK = 512  # tokens of a block of a trace


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


class TraceLine(NamedTuple):
    """A request of a trace in the format of Mooncake, which has JSON lines of these keys.

    A block's id stands for all tokens up to its end; the last block of a prompt may be shorter. Prompts are known to be
    equal in whole blocks only, and answers have no ids.
    """

    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: list[int]

    @classmethod
    def parse(cls, text: bytes) -> "TraceLine":
        """Raises ValueError."""
        values = json.loads(text)
        if not isinstance(values, dict) or (missing := [name for name in cls._fields if name not in values]):
            raise ValueError(f"it lacks {', '.join(missing) if isinstance(values, dict) else 'an object'}")
        line = cls(*(values[name] for name in cls._fields))
        ids = line.hash_ids if isinstance(line.hash_ids, list) else [None]
        if not isinstance(line.timestamp, int | float) or not all(type(n) is int for n in (*line[1:3], *ids)):
            raise ValueError("its time must be a number, its lengths and hash_ids integers")
        if not 0 <= line.timestamp < inf or line.input_length < 1 or line.output_length < 0:
            raise ValueError("it has a negative time or length")
        if len(ids) != (blocks := -(-line.input_length // BLOCK)):
            raise ValueError(f"{line.input_length} tokens are {blocks} blocks, and it has {len(ids)} hash_ids")
        return line


def read_trace_lines(path: Path) -> list[tuple[int, TraceLine]]:
    """Each with its number, by their times. Raises ValueError that names the line, and OSError."""
    found: list[tuple[int, TraceLine]] = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            if text.strip():
                found.append((number, TraceLine.parse(text)))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not a request of a trace: {error}") from None
    if not found:
        raise ValueError(f"{path} has no requests")
    return sorted(found, key=lambda one: one[1].timestamp)


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """The requests of a trace, with random words: equal blocks have equal words."""

    lines: list[TraceLine]
    words: Words
    as_ids: bool = False  # prompts are token ids

    @classmethod
    def of(cls, path: Path, words: Words, *, as_ids: bool) -> "TraceLoad":
        """Raises ValueError that names the line, and OSError."""
        return cls([line for _, line in read_trace_lines(path)], words, as_ids)

    def sessions(self) -> Iterator[Session]:
        blocks: dict[int, list[Any]] = {}
        for line in self.lines:
            yield (Turn(self._prompt(line, blocks), max(1, line.output_length)),)

    def times_s(self, speed: float) -> tuple[float, ...]:
        """Of all requests, from the first one on. `speed`: by which they come faster than in the trace."""
        first_ms = self.lines[0].timestamp
        return tuple((line.timestamp - first_ms) / 1e3 / speed for line in self.lines)

    def _prompt(self, line: TraceLine, blocks: dict[int, list[Any]]) -> Prompt:
        """`blocks`: words, or ids of tokens, of the blocks that were met."""
        found: list[Any] = []
        for block in line.hash_ids:
            if block not in blocks:
                blocks[block] = self.words.ids(BLOCK) if self.as_ids else self.words.text(BLOCK).split(" ")
            found += blocks[block]
        tokens = found[: line.input_length]
        return tokens if self.as_ids else " ".join(tokens)
