"""LoRA adapters that come and go under streams: whether streams are disturbed, and what memory is lost.

    python -m benchmarks.serving.adapters --model 20b
    python -m benchmarks.serving.adapters --adapters 12 --places 3 --streams 8

Without --model, the embedded model is served. First, requests have as many adapters as have a place on the device, but
one. Then the same while other adapters are loaded, answer and are unloaded, one after the other. Then all adapters are
loaded, and each request has any of them; then they are unloaded. For each part: tokens/s, and the longest time between
two pieces of text of a stream. Memory is printed where only the first adapters are loaded: if it grows from round to
round, some is lost. Exits with status 1 if a request failed.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path

import httpx

from benchmarks.kernels.lora import write_adapter
from benchmarks.serving.server import Server
from benchmarks.serving.switching import memory
from oscine.checkpoint.hub import NANO_FOLDER, PUBLISHED, config_at
from oscine.extensions.bench.serve.answer import Record
from oscine.extensions.bench.serve.api import APIS
from oscine.extensions.bench.serve.arrival import Arrival
from oscine.extensions.bench.serve.drive import NUM_COUNTERS, Client, Driver, Job
from oscine.extensions.bench.serve.load import Turn
from oscine.extensions.bench.serve.target import Target

TOKENS, PROMPT = 256, 32  # of a request
RANK = 16


def name_of(number: int) -> str:
    return f"a{number}"


@dataclass
class Streams:
    """Sends requests, and prints what was seen of the streams."""

    client: Client
    concurrency: int
    requests: int  # of each part
    vocabulary: int
    failures: list[str] = field(default_factory=list)

    async def run(self, what: str, adapters: Sequence[int]) -> None:
        """Each request has one of `adapters`, at random."""
        jobs, began_s = [self._job(random.choice(adapters)) for _ in range(self.requests)], time.perf_counter()
        driver = Driver(self.client, [0] * NUM_COUNTERS)
        records = await driver.drive(jobs, Arrival(self.concurrency), began_s)
        rate = sum(one.output_tokens for one in records) / (time.perf_counter() - began_s)
        failures = [one.error for one in records if one.error]
        longest_s = max(map(longest_gap_s, records))
        print(f"{what}: {rate:,.0f} tokens/s, longest gap {longest_s * 1e3:.0f} ms, {len(failures)} failed", flush=True)
        self.failures += failures

    def _job(self, adapter: int) -> Job:
        prompt = [random.randrange(self.vocabulary) for _ in range(PROMPT)]
        turn = Turn(prompt, TOKENS, {"model": name_of(adapter)})
        return Job((turn,), self.client.request(turn, []), 0.0)


def longest_gap_s(record: Record) -> float:
    return max((later - before for before, later in pairwise(record.events_s)), default=0.0)


@dataclass
class Adapters:
    """Loads and unloads them; each is in a folder of its own."""

    http: httpx.AsyncClient
    folders: Sequence[Path]

    async def load(self, number: int) -> None:
        await self._post("load_lora_adapter", lora_name=name_of(number), lora_path=str(self.folders[number]))

    async def unload(self, number: int) -> None:
        await self._post("unload_lora_adapter", lora_name=name_of(number))

    async def come_and_go(self, numbers: Iterator[int], over: asyncio.Event) -> list[float]:
        """Each is loaded, answers, and is unloaded, until it is `over`. Returns the seconds of the loads."""
        loads_s = []
        while not over.is_set():
            number, began_s = next(numbers), time.monotonic()
            await self.load(number)
            loads_s.append(time.monotonic() - began_s)
            await self._post("completions", model=name_of(number), prompt=[1, 2, 3], max_tokens=8, ignore_eos=True)
            await self.unload(number)
        return loads_s

    async def _post(self, path: str, **body: object) -> None:
        (await self.http.post(f"/v1/{path}", json=body)).raise_for_status()


async def measure(server: Server, folders: Sequence[Path], vocabulary: int, args: argparse.Namespace) -> int:
    client = Client(Target.parse(server.url, None), APIS["completions"], "", {"ignore_eos": True})
    streams = Streams(client, args.streams, args.requests, vocabulary)
    first, others = range(args.places - 1), range(args.places - 1, len(folders))
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as http:
        adapters, numbers = Adapters(http, folders), cycle(others)
        await streams.run(f"{len(first)} adapters", first)
        for _ in range(args.rounds):
            print_memory(server)
            over = asyncio.Event()
            coming = asyncio.create_task(adapters.come_and_go(numbers, over))
            await streams.run("the same, others come and go", first)
            over.set()
            loads_s = await coming
            print(f"  {len(loads_s)} loads, {sum(loads_s) / len(loads_s):.3f} s on average, {max(loads_s):.3f} at most")
            for number in others:
                await adapters.load(number)
            await streams.run(f"any of {len(folders)} adapters, {args.places} on the device", range(len(folders)))
            for number in others:
                await adapters.unload(number)
            await asyncio.sleep(1)
        print_memory(server)
    return len(streams.failures)


def print_memory(server: Server) -> None:
    print(", ".join(f"{place} {size:.0f} MiB" for place, size in memory(server.pid).items()), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(PUBLISHED), help="random weights of these shapes")
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--places", type=int, default=8, help="--max-loras")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512, help="of each part")
    parser.add_argument("--rounds", type=int, default=2, help="of all but the first part")
    args = parser.parse_args()
    config = PUBLISHED[args.model]() if args.model else config_at(NANO_FOLDER)
    with tempfile.TemporaryDirectory() as folder:
        numbers = range(args.adapters)
        folders = [write_adapter(Path(folder, str(i)), config, RANK, "attention", i) for i in numbers]
        places = ["--max-loras", str(args.places), "--max-lora-rank", str(RANK)]
        modules = [f"{name_of(i)}={folders[i]}" for i in numbers[: args.places - 1]]
        # On a CPU, a large cache would take its memory page by page meanwhile.
        own = ["--random-weights", args.model] if args.model else ["--kv-cache-bytes", str(1 << 27)]
        own += ["--max-num-seqs", str(args.streams + 8), "--log-level", "warning"]
        with Server(*own, "--enable-lora", *places, "--lora-modules", *modules, ready_timeout_s=300) as server:
            return min(1, asyncio.run(measure(server, folders, config.vocab_size, args)))


if __name__ == "__main__":
    sys.exit(main())
