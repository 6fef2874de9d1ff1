"""LoRA adapters that come and go under streams: whether streams are disturbed, and what memory is lost.

    python -m benchmarks.serving.adapters --model 20b
    python -m benchmarks.serving.adapters --adapters 12 --places 3 --streams 8 --seconds 5

Without --model, the embedded model is served. First streams of as many adapters as have a place on the device, but
one. Then the same streams while other adapters are loaded, answer and are unloaded, one after the other. Then all
adapters are loaded, and each request has any of them; then they are unloaded. For each part: events/s, and the longest
time between two events of a stream. Memory is printed where only the first adapters are loaded: if it grows from round
to round, some is lost. Exits with status 1 if a stream failed.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import cast

import httpx

from benchmarks.kernels.lora import write_adapter
from benchmarks.serving.server import Server
from benchmarks.serving.switching import memory
from oscine.checkpoint.hub import NANO_FOLDER, config_at
from oscine.extensions.bench.serve.answer import Answer
from oscine.extensions.bench.serve.connection import Connection
from oscine.extensions.bench.serve.target import Target
from oscine.model.config import ModelConfig, gpt_oss_20b, gpt_oss_120b

TOKENS, PROMPT, FIRST_EVENTS = 256, 32, 4  # of a request; events of a stream before its gaps count
RANK = 16


@dataclass
class Seen:
    """What the streams of one part have shown."""

    events: int = 0
    longest_s: float = 0.0
    answers: int = 0
    failures: list[str] = field(default_factory=list)


class Watched:
    """One answer: takes what Connection gives an Answer."""

    begun = False

    def __init__(self, seen: Seen) -> None:
        self._seen, self._events, self._last_s, self._rest = seen, 0, 0.0, b""
        self.status = 0

    def head(self, status: int, content_type: str) -> None:
        self.status = status

    def feed(self, data: bytes, now_s: float) -> None:
        self._rest = (self._rest + data)[-400:]
        if self._events >= FIRST_EVENTS:
            self._seen.longest_s = max(self._seen.longest_s, now_s - self._last_s)
        count = data.count(b"data: ")
        self._events += count
        self._seen.events += count
        self._last_s = now_s

    def finish(self, name: str) -> None:
        if self.status == 200 and self._rest.endswith(b"data: [DONE]\n\n") and b'"error"' not in self._rest:
            self._seen.answers += 1
        else:
            self._seen.failures.append(f"{name}: {self.status} {self._rest!r}")


async def stream(target: Target, names: Callable[[], str], vocabulary: int, end_s: float, seen: Seen) -> None:
    """Requests one after the other, each for a model that `names` gives, until `end_s`."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, target.host, target.port)
    while time.monotonic() < end_s:
        name, answer = names(), Watched(seen)
        body = {
            "model": name,
            "prompt": [random.randrange(vocabulary) for _ in range(PROMPT)],
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        try:
            await connection.ask(target.request("/v1/completions", json.dumps(body).encode()), cast(Answer, answer))
        except (OSError, ValueError) as error:
            seen.failures.append(f"{name}: {error!r}")
            return
        answer.finish(name)
    connection.close()


@dataclass
class Adapters:
    """Loads and unloads them; all in folders of their own."""

    http: httpx.AsyncClient
    folders: list[Path]

    async def load(self, number: int) -> None:
        body = {"lora_name": f"a{number}", "lora_path": str(self.folders[number])}
        (await self.http.post("/v1/load_lora_adapter", json=body)).raise_for_status()

    async def unload(self, number: int) -> None:
        (await self.http.post("/v1/unload_lora_adapter", json={"lora_name": f"a{number}"})).raise_for_status()

    async def come_and_go(self, numbers: Iterator[int], end_s: float) -> list[float]:
        """Each is loaded, answers, and is unloaded. Returns the seconds of the loads."""
        times = []
        while time.monotonic() < end_s:
            number, began_s = next(numbers), time.monotonic()
            await self.load(number)
            times.append(time.monotonic() - began_s)
            body = {"model": f"a{number}", "prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True}
            (await self.http.post("/v1/completions", json=body | {"return_token_ids": True})).raise_for_status()
            await self.unload(number)
        return times


async def measure(server: Server, folders: list[Path], vocabulary: int, args: argparse.Namespace) -> int:
    target, failures = Target.parse(server.url, None), 0
    few, all_names = args.places - 1, [f"a{number}" for number in range(len(folders))]

    async def part(what: str, names: list[str], *beside: Callable[[float], object]) -> list[object]:
        nonlocal failures
        seen, end_s = Seen(), time.monotonic() + args.seconds
        own = (
            stream(
                target, lambda i=i: names[i % len(names)] if beside else random.choice(names), vocabulary, end_s, seen
            )  # type: ignore[misc]
            for i in range(args.streams)
        )
        found = await asyncio.gather(*(cast("asyncio.Future[object]", one(end_s)) for one in beside), *own)
        rate = seen.events / args.seconds
        print(f"{what}: {rate:,.0f} events/s, {seen.answers} answers, longest gap {seen.longest_s * 1e3:.0f} ms")
        for failure in seen.failures[:5]:
            print(f"  {failure}")
        failures += len(seen.failures)
        return list(found[: len(beside)])

    async with httpx.AsyncClient(base_url=server.url, timeout=300) as http:
        adapters, others = Adapters(http, folders), range(few, len(folders))

        numbers = cycle(others)

        async def nothing(_: float) -> None: ...

        async def come_and_go(end_s: float) -> list[float]:
            return await adapters.come_and_go(numbers, end_s)

        await adapters.come_and_go(numbers, time.monotonic() + 1)
        await part(f"{args.streams} streams of {few} adapters", all_names[:few], nothing)
        for _ in range(args.rounds):
            print(", ".join(f"{place} {size:.0f} MiB" for place, size in memory(server.pid).items()))
            (times,) = await part("the same, others come and go", all_names[:few], come_and_go)
            loads = cast(list[float], times)
            mean_s, most_s = sum(loads) / len(loads), max(loads)
            print(f"  {len(loads)} came and went; a load took {mean_s * 1e3:.0f} ms, {most_s * 1e3:.0f} at most")
            for number in others:
                await adapters.load(number)
            await part(f"streams of any of {len(folders)}, {args.places} on the device", all_names)
            for number in others:
                await adapters.unload(number)
            await asyncio.sleep(1)
        print(", ".join(f"{place} {size:.0f} MiB" for place, size in memory(server.pid).items()))
        print(f"{failures} streams failed")
    return failures


def config_of(model: str) -> ModelConfig:
    return {"20b": gpt_oss_20b, "120b": gpt_oss_120b}.get(model, lambda: config_at(NANO_FOLDER))()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("20b", "120b"), default="", help="random weights of these shapes")
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--places", type=int, default=8, help="--max-loras")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each part")
    parser.add_argument("--rounds", type=int, default=2, help="of all but the first part")
    args = parser.parse_args()
    config = config_of(args.model)
    with tempfile.TemporaryDirectory() as folder:
        folders = [
            write_adapter(Path(folder, str(number)), config, RANK, "attention", number)
            for number in range(args.adapters)
        ]
        modules = [f"a{number}={folders[number]}" for number in range(args.places - 1)]
        options = [
            "--max-num-seqs",
            str(args.streams + 8),
            "--enable-lora",
            "--max-loras",
            str(args.places),
            "--max-lora-rank",
            str(RANK),
            "--lora-modules",
            *modules,
        ]
        # On a CPU, a large cache would take its memory page by page meanwhile.
        weights = ["--random-weights", args.model] if args.model else ["--kv-cache-bytes", str(1 << 27)]
        with Server(*weights, *options, "--log-level", "warning", ready_timeout_s=300) as server:
            failures = asyncio.run(measure(server, folders, config.vocab_size, args))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
