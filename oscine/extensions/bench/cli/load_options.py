"""The options that `oscine bench serve` and `oscine bench sweep` share, and the objects that they describe."""

import argparse
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from oscine.cli.serve.options import add_some
from oscine.settings.config import NANO
from oscine.settings.option import OptionError, Options, option, options_of, require
from oscine.system.environment import Environment

if TYPE_CHECKING:
    from oscine.extensions.bench.serve.arrival import Arrival
    from oscine.extensions.bench.serve.load import FileLoad, RandomLoad, Shapes, TraceLoad
    from oscine.extensions.bench.serve.run import Bench

_WARM_UP, _PER_USER, _OPEN_S = 2, 10, 60
_MOST_TOKENS, _MOST_SESSIONS = 1 << 24, 1_000_000  # each prompt, and each session, is in memory before it is sent


@dataclass(frozen=True)
class Asked(Options, group="server"):
    api: Literal["chat", "completions", "responses"] = option("chat", "API that the requests use")
    model: str | None = option(None, "model that the requests name", "NAME", shown="the server's first model")
    api_key: str | None = option(None, "API key of the server", "KEY", shown="OPENAI_API_KEY")
    parameter: tuple[str, ...] = option(
        (), "parameters of every request, such as temperature=0.5", "NAME=JSON", nargs="+", shown="none"
    )
    ignore_eos: bool = option(
        False, "generate exactly --osl tokens per answer, on servers with the parameter ignore_eos"
    )
    timeout: float = option(3600.0, "seconds after which an answer counts as failed", "SECONDS", above=0)

    def parameters(self) -> dict[str, Any]:
        """Raises OptionError."""
        pairs = (_pair("parameter", text, "=") for text in self.parameter)
        eos = {"ignore_eos": True} if self.ignore_eos else {}
        return eos | {name: _json(value) for name, value in pairs}


@dataclass(frozen=True)
class Workload(Options, group="workload"):
    isl: int = option(
        1024, "tokens of a prompt's text; the chat template adds more", "TOKENS", at_least=1, at_most=_MOST_TOKENS
    )
    osl: int = option(256, "most tokens of an answer", "TOKENS", at_least=1)
    spread: float = option(
        0.0,
        "random spread of lengths: uniform between 1 - SHARE and 1 + SHARE times --isl and --osl",
        "SHARE",
        at_least=0,
        at_most=1,
    )
    shared_prefix: int = option(
        0,
        "tokens of a shared prefix before each session's first prompt, in addition to --isl",
        "TOKENS",
        at_least=0,
        at_most=_MOST_TOKENS,
    )
    num_prefixes: int = option(1, "number of different shared prefixes", "N", at_least=1)
    turns: int = option(1, "turns per session; a session with one turn is one request", "N", at_least=1)
    think: float = option(0.0, "seconds between an answer and the next turn of its session", "SECONDS", at_least=0)
    dataset: str | None = option(
        None, "JSON lines to send instead of random prompts: request bodies, a batch file, or lists of turns", "FILE"
    )
    token_ids: bool = option(False, "send prompts as token ids; only with --api completions")
    tokenizer: str | None = option(
        None, "tokenizer.json, or its folder, to count prompt tokens with", "PATH", shown="gpt-oss's own"
    )
    seed: int | None = option(
        None, "seed of prompts, lengths and arrivals", "SEED", shown="another one every time", at_least=0
    )

    def load(self, model: str, seed: int) -> "RandomLoad | FileLoad":
        """Raises ValueError."""
        from oscine.extensions.bench.serve.load import FileLoad, RandomLoad
        from oscine.extensions.bench.serve.words import Words

        if self.dataset is not None:
            return FileLoad(Path(self.dataset), self.osl)
        return RandomLoad(Words.of(self._tokenizer(model), seed), self.shapes(seed), self.token_ids)

    def replay(self, trace: Path, model: str, seed: int) -> "TraceLoad":
        """Raises ValueError and OSError."""
        from oscine.extensions.bench.serve.load import TraceLoad
        from oscine.extensions.bench.serve.words import Words

        return TraceLoad.of(trace, Words.of(self._tokenizer(model), seed), as_ids=self.token_ids)

    def shapes(self, seed: int) -> "Shapes":
        from oscine.extensions.bench.serve.load import Lengths, Shapes

        lengths = Lengths(self.isl, self.osl, self.spread)
        return Shapes(lengths, self.turns, self.shared_prefix, self.num_prefixes, seed)

    def _tokenizer(self, model: str) -> Path:
        from oscine.checkpoint.hub import NANO_FOLDER
        from oscine.model.o200k import o200k_folder

        if self.tokenizer is not None:
            return Path(self.tokenizer)
        return NANO_FOLDER if model == NANO else o200k_folder()

    def keys(self) -> dict[str, Any]:
        """The keys of a row that describe the workload."""
        return {"isl": self.isl, "osl": self.osl} if self.dataset is None else {"isl": None, "osl": None}

    def __str__(self) -> str:
        if self.dataset is not None:
            return f"requests of {self.dataset}"
        turns = f", {self.turns} turns" if self.turns > 1 else ""
        prefix = f", {self.num_prefixes} shared prefixes of {self.shared_prefix}" if self.shared_prefix else ""
        return f"{self.isl} tokens in, {self.osl} out{turns}{prefix}"


@dataclass(frozen=True)
class Sending(Options, group="arrival"):
    burst: int = option(1, "sessions that arrive at the same time; the rate stays the same", "N", at_least=1)
    constant_rate: bool = option(False, "send sessions at equal intervals instead of a Poisson process")
    trace_speed: float = option(1.0, "number by which the times of --trace are divided", "X", above=0)
    sessions: int | None = option(
        None,
        "number of measured sessions",
        "N",
        shown=f"{_PER_USER} times --concurrency; with --rate, the arrivals of {_OPEN_S} seconds",
        at_least=1,
    )
    warm_up: int | None = option(
        None,
        "number of warm-up sessions before the measurement, which do not count",
        "N",
        shown=f"--concurrency; with --rate, {_WARM_UP}",
        at_least=0,
    )
    processes: int = option(1, "number of client processes that share the load", "N", at_least=1)

    def arrival(self, concurrency: int | None, rate: float | None) -> "Arrival":
        """Raises OptionError."""
        from oscine.extensions.bench.serve.arrival import Arrival

        _needs("trace-speed", self.trace_speed != 1, "trace", False)
        self._check_rate(rate)
        return Arrival(concurrency, rate, self.burst, self.constant_rate)

    def arrival_of_trace(self, load: "TraceLoad", concurrency: int | None) -> "Arrival":
        """Of the first requests of a trace. Raises OptionError."""
        from oscine.extensions.bench.serve.arrival import Arrival

        self._check_rate(None)
        require(not self.warm_up, "warm-up", "0 with --trace", self.warm_up)
        times_s = load.times_s(self.trace_speed)[: self.sessions]
        return Arrival(concurrency, len(times_s) / max(times_s[-1], 1.0), times_s=times_s)

    def _check_rate(self, rate: float | None) -> None:
        _needs("burst", self.burst > 1, "rate", rate is not None)
        _needs("constant-rate", self.constant_rate, "rate", rate is not None)

    def counts(self, arrival: "Arrival") -> tuple[int, int]:
        """Numbers of measured sessions and of warm-up sessions. Raises OptionError for too many."""
        if arrival.times_s:
            return len(arrival.times_s), 0
        if arrival.rate is None:
            assert arrival.concurrency
            sessions, warm_up = _PER_USER * arrival.concurrency, arrival.concurrency
        else:
            sessions, warm_up = max(1, round(min(_OPEN_S * arrival.rate, 2 * _MOST_SESSIONS))), _WARM_UP
        load = f"--concurrency {arrival.concurrency}" if arrival.rate is None else f"--rate {arrival.rate:g}"
        asked = ("sessions", self.sessions, sessions), ("warm-up", self.warm_up, warm_up)
        for name, given, usual in asked:
            if (usual if given is None else given) > _MOST_SESSIONS:
                why = f"and {load} makes more" if given is None else f"not {given}"
                raise OptionError(name, f"must be at most {_MOST_SESSIONS:,}, {why}")
        return self.sessions or sessions, warm_up if self.warm_up is None else self.warm_up


@dataclass(frozen=True)
class Reporting(Options, group="results"):
    goodput: tuple[str, ...] = option(
        (),
        "limits in milliseconds for ttft, tpot and e2el; goodput is the rate of requests that meet all of them",
        "NAME:MS",
        nargs="+",
        shown="none",
    )
    gpus: int | None = option(
        None, "number of GPUs of the server, for tokens/s per GPU", "N", at_least=1, shown="figures of the whole server"
    )
    label: tuple[str, ...] = option(
        (),
        "additional keys of the result rows, such as hw=h200 framework=vllm precision=fp4",
        "KEY=VALUE",
        nargs="+",
        shown="none",
    )

    def limits_s(self) -> dict[str, float]:
        """Raises OptionError."""
        from oscine.extensions.bench.serve.measure import LIMITS

        limits = {}
        for text in self.goodput:
            name, value = _pair("goodput", text, ":")
            try:
                limits[name] = float(value) / 1e3
            except ValueError:
                raise OptionError("goodput", f"needs a number of milliseconds, unlike {text!r}") from None
            if name not in LIMITS:
                raise OptionError("goodput", f"knows {', '.join(LIMITS)}, not {name!r}")
        return limits

    def labels(self) -> dict[str, Any]:
        """Raises OptionError."""
        return {key: _json(value) for key, value in (_pair("label", text, "=") for text in self.label)}


_SECTIONS = (Asked, Workload, Sending, Reporting)


@dataclass(frozen=True)
class Load:
    """The options of a measurement, except for concurrency and rate."""

    url: str
    asked: Asked
    workload: Workload
    sending: Sending
    reporting: Reporting
    trace: Path | None = None

    @classmethod
    def of(cls, url: str, given: Mapping[str, Any]) -> "Load":
        """Raises OptionError."""
        options = Asked.of(given), Workload.of(given), Sending.of(given), Reporting.of(given)
        load = cls(url, *options, given.get("trace"))
        work = load.workload
        if work.token_ids and (load.asked.api != "completions" or work.turns > 1):
            raise OptionError("token-ids", "is for --api completions with one turn per session")
        if work.dataset is not None and (work.turns > 1 or work.shared_prefix or work.token_ids):
            raise OptionError("dataset", "has prompts of its own; --turns, --shared-prefix and --token-ids make others")
        if load.trace is not None and (work.dataset is not None or work.turns > 1 or work.shared_prefix):
            raise OptionError("trace", "has requests of its own; --dataset, --turns and --shared-prefix make others")
        _needs("num-prefixes", work.num_prefixes > 1, "shared-prefix", work.shared_prefix > 0)
        _needs("think", work.think > 0, "turns", work.turns > 1 or work.dataset is not None)
        return load

    def bench(self) -> "Bench":
        """Finds the server and its model. Raises ValueError, OSError and TargetError."""
        from oscine.extensions.bench.serve.api import APIS
        from oscine.extensions.bench.serve.drive import Client
        from oscine.extensions.bench.serve.run import Bench
        from oscine.extensions.bench.serve.target import Target

        parameters, limits_s = self.asked.parameters(), self.reporting.limits_s()
        self.reporting.labels()
        target = Target.parse(self.url, self.asked.api_key or Environment().api_key)
        model = target.find_model(self.asked.model)
        client = Client(
            target, APIS[self.asked.api], model, parameters, timeout_s=self.asked.timeout, think_s=self.workload.think
        )
        seed = random.getrandbits(32) if self.workload.seed is None else self.workload.seed
        found = self.workload.load(model, seed) if self.trace is None else self.workload.replay(self.trace, model, seed)
        return Bench(client, found, seed, self.sending.processes, limits_s)

    def keys(self) -> dict[str, Any]:
        """The keys of a row that describe the workload."""
        if self.trace is None:
            return self.workload.keys()
        return {"isl": None, "osl": None, "trace": str(self.trace), "trace_speed": self.sending.trace_speed}


def add_load_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="server to measure, such as http://127.0.0.1:8000")
    for section in _SECTIONS:
        add_some(parser.add_argument_group(section.group), options_of(section))


def _needs(name: str, is_given: bool, other: str, has_other: bool) -> None:
    if is_given and not has_other:
        raise OptionError(name, f"needs --{other}")


def _pair(name: str, text: str, sign: str) -> tuple[str, str]:
    key, found, value = text.partition(sign)
    if not found or not key:
        raise OptionError(name, f"takes NAME{sign}VALUE, not {text!r}")
    return key, value


def _json(text: str) -> Any:
    """A value of JSON; a text may lack its quotes."""
    try:
        return json.loads(text)
    except ValueError:
        return text
