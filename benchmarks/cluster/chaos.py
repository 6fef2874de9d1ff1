"""A cluster must survive kill -9 of a decode replica, of the prefill replica and of the router, under streams.

    python -m benchmarks.cluster.chaos [--streams 32] [--rounds 1]

The embedded model behind one ingress, one router, one prefill and two decode replicas. Half of the streams have begun
before the kill; the others begin in that moment. No request may fail, each greedy text must equal that of an
undisturbed run, and the killed part must come back by itself. Prints the longest pauses; ends with status 1 if a
promise was broken.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.cluster.cluster import Cluster
from oscine.extensions.replicas.spec.deployment import Deployment, ModelSpec, PrefillLimits, Replicas, RoleSpec
from oscine.settings.config import CacheOptions, EngineOptions, SchedulerOptions, ServerOptions

VICTIMS = ("decode", "prefill", "router")
REPLICAS = {"decode": 2, "prefill": 1}
MODEL = "oscine-nano"
BACK_S = 120.0
LOOK_S = 0.5  # between two checks whether all parts are back
STREAM_S = 240.0  # that a stream may take on a slow machine
PAGE = 16  # tokens; small, so that prompts of the embedded model have some
TURNS = 6  # of the earlier conversation: the prompt for a prefill replica


class Broken(Exception):  # noqa: N818  (reads as what happened)
    """A promise that was not kept."""


def deployment(streams: int) -> Deployment:
    scheduler = SchedulerOptions(max_num_seqs=streams)
    engine = EngineOptions(cache=CacheOptions(page_size=PAGE), scheduler=scheduler, quiet=True)
    roles = tuple(RoleSpec(role, engine, Replicas(count, count)) for role, count in REPLICAS.items())  # type: ignore[arg-type]
    model = ModelSpec((MODEL,), roles, prefill=PrefillLimits(min_tokens=64), migration_retries=4)
    return Deployment((model,), server=ServerOptions(port=0, log_level="warning"), prefix_seed="0c" * 16)


def conversation(number: int) -> dict[str, Any]:
    """A greedy request; each number gives a different beginning."""
    messages = []
    for turn in range(TURNS):
        a, b = 11 + 7 * number + turn, 20 + turn
        messages += [
            {"role": "user", "content": f"What is {a} + {b}?"},
            {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
        ]
    messages.append({"role": "user", "content": f"What is {20 + number % 70} + {10 + number % 80}?"})
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 200, "reasoning_effort": "high"}


@dataclass
class Stream:
    """One client's view of its stream."""

    text: str = ""
    finish: str | None = None
    pause_s: float = 0.0  # longest time between two pieces of text
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    heard_s: float = 0.0

    async def run(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        """Raises Broken for anything but a whole answer."""
        async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            if response.status_code != 200:
                raise Broken(f"status {response.status_code}: {(await response.aread())!r}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))
        if self.finish is None:
            raise Broken(f"a stream ended early, after {self.text!r}")

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise Broken(f"a stream failed: {event['error']}")
        for choice in event["choices"]:
            delta = choice["delta"]
            self.finish = choice["finish_reason"] or self.finish
            text = (delta.get("reasoning") or "") + (delta.get("content") or "")
            if text:
                now = time.perf_counter()
                self.pause_s = max(self.pause_s, now - self.heard_s if self.text else 0.0)
                self.text, self.heard_s = self.text + text, now
                self.begun.set()


async def run_streams(
    cluster: Cluster, bodies: list[dict[str, Any]], victim: str | None = None
) -> tuple[list[Stream], float]:
    """Runs all streams to their ends. Also returns the seconds from the kill until all parts are back. Raises
    Broken."""
    back_s = 0.0
    doomed = None
    if victim is not None:
        found = await asyncio.to_thread(cluster.actors)
        doomed = next((actor for actor in found if actor.kind == victim), None)
        if doomed is None:
            raise Broken(f"there is no {victim}")
    streams = [Stream() for _ in bodies]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=STREAM_S, limits=limits) as client:

        def start(number: int) -> asyncio.Task[None]:
            return asyncio.create_task(streams[number].run(client, bodies[number]))

        half = len(bodies) // 2 if doomed is not None else len(bodies)
        tasks = [start(i) for i in range(half)]
        if doomed is not None:
            await asyncio.gather(*(stream.begun.wait() for stream in streams[:half]))
            tasks += [start(i) for i in range(half, len(bodies))]
            await asyncio.sleep(0.05)
            await asyncio.to_thread(cluster.kill, doomed)
            back_s = await asyncio.to_thread(wait_back, cluster)
        await asyncio.gather(*tasks)
    return streams, back_s


def wait_back(cluster: Cluster) -> float:
    """Seconds until everything runs, and the router knows all replicas as ready. Raises Broken."""
    started_s = time.monotonic()
    while time.monotonic() - started_s < BACK_S:
        there = Counter(actor.kind for actor in cluster.actors())
        actors = {kind: there[kind] for kind in VICTIMS}
        if actors == REPLICAS | {"router": 1} and cluster.ready() == REPLICAS:
            return time.monotonic() - started_s
        time.sleep(LOOK_S)
    raise Broken(f"not back after {BACK_S:g} s: {actors}, {dict(cluster.ready())} of them ready")


def survive(cluster: Cluster, victim: str, bodies: list[dict[str, Any]]) -> str:
    """Raises Broken. The undisturbed run comes second, so that the first one finds no prefix in a cache."""
    disturbed, back_s = asyncio.run(run_streams(cluster, bodies, victim))
    calm, _ = asyncio.run(run_streams(cluster, bodies))
    for one, other in zip(disturbed, calm, strict=True):
        if (one.text, one.finish) != (other.text, other.finish):
            raise Broken(f"{one.text!r} ({one.finish}) is not {other.text!r} ({other.finish})")
    pauses = [max(stream.pause_s for stream in streams) for streams in (disturbed, calm)]
    return (
        f"{len(bodies)} texts as undisturbed, longest pause {pauses[0]:.2f} s (undisturbed {pauses[1]:.2f} s), "
        f"back after {back_s:.1f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32, help="streams at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds per promise (default: %(default)s)")
    args = parser.parse_args()
    broken = 0
    with Cluster(deployment(args.streams)) as cluster:
        wait_back(cluster)
        for i, victim in enumerate(VICTIMS * args.rounds):
            bodies = [conversation(i * args.streams + number) for number in range(args.streams)]
            started_s = time.monotonic()
            try:
                found = survive(cluster, victim, bodies)
            except Broken as error:
                broken += 1
                found = f"BROKEN: {error}"
            print(f"{victim} killed: {found} ({time.monotonic() - started_s:.0f} s)", flush=True)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
