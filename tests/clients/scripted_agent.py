"""A server under agents: HTTP, prompts, parsing and prefix cache are real; what the model writes is a script."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any

from oscine.extensions.apis.compaction.summary import ASK
from oscine.types import GenerationRequest
from tests.api.caching_engine import LONGEST, PAGE, CachingEngine
from tests.extensions.apis.socket_server import SocketServer

NANO = Path(__file__).parents[2] / "oscine" / "model" / "nano"
MODEL = "oscine-nano"
VOCABULARY = 1920


@dataclass(frozen=True)
class Call:
    """What the model calls. `arguments` is a text for custom tools."""

    tool: str
    arguments: dict[str, Any] | str


@dataclass(frozen=True)
class Asked:
    """A request of the job itself, not of a title or a summary."""

    prompt: list[int]
    written: list[int]
    cached: int
    max_tokens: int

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.written]


class ScriptedAgent:
    """Context manager. The model makes each step of `steps` in turn, and then says `last`; what has no tools, or asks
    for a summary, is answered with `aside`."""

    last = "The whole job is done."
    aside = "A summary: the shop is mended step by step."

    def __init__(self, max_model_len: int = LONGEST, is_aside: Callable[[str], bool] = lambda text: False) -> None:
        """`is_aside`: of the newest message of a prompt."""
        self._engine = CachingEngine(max_model_len, VOCABULARY)
        self._engine.answer = self._answer
        self._server = SocketServer(NANO, self._engine, MODEL)
        from tests.clients.checked_app import CheckedApp  # a second of imports, when a test runs

        config = self._server.server.config
        self.app = config.loaded_app = CheckedApp(config.loaded_app)
        self._tokenizer, self._is_aside = self._server.tokenizer, is_aside
        self._steps: list[Call] = []
        self._main: list[int] = []  # indices of requests
        self._written: list[list[int]] = []
        self._num_summaries = 0  # that the server asked for itself, within an answer
        self.asides: list[str] = []  # newest messages of other requests

    def __enter__(self) -> "ScriptedAgent":
        self._server.__enter__()
        self.url, self.host, self.port = self._server.url, "127.0.0.1", int(self._server.url.rpartition(":")[2])
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._server.__exit__(kind, value, tb)
        if kind is None:
            assert not self.app.wrong, self.app.wrong[0]
            assert self.app.num_unfinished == 0, "all answers were read to their end"
            within = self.app.num_answers + self._num_summaries
            assert within == len(self._written), "each request to the engine is within an answer that was checked"

    def begin(self, steps: Sequence[Call]) -> None:
        """A new job."""
        self._steps, self._main, self.asides = list(steps), [], []

    @property
    def left(self) -> int:
        return len(self._steps)

    @property
    def asked(self) -> list[Asked]:
        found = ((self._engine.requests[i], self._written[i], self._engine.cached[i]) for i in self._main)
        return [Asked(of.prompt_token_ids, written, cached, of.sampling.max_tokens) for of, written, cached in found]

    def text(self, asked: Asked) -> str:
        return self._tokenizer.decode(asked.prompt)

    def _answer(self, request: GenerationRequest) -> list[int]:
        prompt = self._tokenizer.decode(request.prompt_token_ids)
        newest = prompt.rpartition("<|start|>assistant")[0].rpartition("<|start|>")[2]
        index = len(self._written)
        if "namespace functions" not in prompt or self._is_aside(newest):
            self.asides.append(newest)
            self._num_summaries += ASK in newest
            ids = self._said(self.aside)
        else:
            self._main.append(index)
            if request.sampling.max_tokens == 1:  # only computed, for the request after it
                ids = self._said(self.last)
            else:
                ids = self._called(self._steps.pop(0)) if self._steps else self._said(self.last)
        self._written.append(ids[: request.sampling.max_tokens])
        return ids

    def _said(self, text: str) -> list[int]:
        t = self._tokenizer
        return [t.channel, *t.encode("final"), t.message, *t.encode(text), t.return_]

    def _called(self, call: Call) -> list[int]:
        t = self._tokenizer
        thought = f"{len(self._steps)} steps are left after this one."
        ids = [t.channel, *t.encode("analysis"), t.message, *t.encode(thought), t.end, t.start]
        ids += [*t.encode("assistant"), t.channel, *t.encode(f"commentary to=functions.{call.tool}")]
        if isinstance(call.arguments, str):
            return [*ids, t.message, *t.encode(call.arguments), t.call]
        return [
            *ids,
            *t.encode(" "),
            t.constrain,
            *t.encode("json"),
            t.message,
            *t.encode(json.dumps(call.arguments)),
            t.call,
        ]


@dataclass(frozen=True)
class Share:
    """Tokens of a job's requests, in whole pages."""

    cached: int  # of those in common, from the cache
    common: int  # the longest common prefixes of requests and those before them, with what was written there
    before: int  # of the requests that have one after them

    @classmethod
    def of(cls, earlier: Asked, asked: Sequence[Asked]) -> "Share":
        """`earlier`: a request that the first one shares a prefix with."""
        pairs = [*zip([earlier, *asked], asked, strict=False)]
        common = [_whole_pages(cls.common_prefix(one.tokens, two.prompt)) for one, two in pairs]
        cached = [min(two.cached, length) for (_, two), length in zip(pairs, common, strict=True)]
        before = [common[0], *(_whole_pages(len(one.tokens)) for one, _ in pairs[1:])]
        return cls(sum(cached), sum(common), sum(before))

    @staticmethod
    def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
        """In tokens."""
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _whole_pages(num_tokens: int) -> int:
    return num_tokens // PAGE * PAGE
