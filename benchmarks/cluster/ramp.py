"""A load that rises and falls: `make cluster-ramp`. Replicas must follow it, 1 -> 4 -> 1, and no request may fail.

    python -m benchmarks.cluster.ramp [--image docs/img/cluster-ramp.png]

Engines have fake executors with a step of 50 ms and four sequences each. So a replica can serve two requests of 40
tokens per second, on any machine. Streaming chat completions come at random times (seeded); each must end with all its
tokens. Draws the load, the replicas and the TTFT. Exit status 1 if a check fails.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path

import aiohttp

from benchmarks.cluster.cluster import Cluster
from benchmarks.cluster.ramp_plot import draw
from benchmarks.serving.overhead import USAGE
from oscine.extensions.replicas.spec.deployment import (
    Deployment,
    ModelSpec,
    Replicas,
    RoleSpec,
    ScalingOptions,
    ServiceLevels,
    app_name,
)
from oscine.extensions.replicas.spec.router_messages import own_version
from oscine.settings.config import EngineOptions, SchedulerOptions, ServerOptions

MODEL, TOKENS, STEP_S, SEQUENCES, MOST = "fake", 40, 0.05, 4, 4
LEVELS = ServiceLevels(ttft_s=2.0, itl_s=0.2)
LOAD = ((0, 0.8), (10, 0.8), (80, 5.6), (110, 5.6), (130, 0.6), (165, 0.6))  # (second, requests/s), lines between
IMAGE = Path("docs/img/cluster-ramp.png")


@dataclass
class Ramp:
    """The observations; times in seconds from the first request."""

    started_s: float = field(default_factory=time.monotonic)
    replicas: list[tuple[float, int]] = field(default_factory=list)  # that are in service
    wanted: list[tuple[float, int]] = field(default_factory=list)  # and those that start
    first_tokens: list[tuple[float, float]] = field(default_factory=list)  # (when asked, seconds)
    longest_s: float = 0.0  # between two pieces of one answer
    failures: list[str] = field(default_factory=list)

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.started_s


def deployment() -> Deployment:
    scheduler = SchedulerOptions(max_num_seqs=SEQUENCES)
    engine = EngineOptions(executor="fake", fake_step_s=STEP_S, scheduler=scheduler, quiet=True)
    role = RoleSpec("aggregated", engine, Replicas(1, MOST))
    scaling = ScalingOptions(up_cooldown_s=3.0, down_cooldown_s=8.0)
    model = ModelSpec((MODEL,), (role,), levels=LEVELS, scaling=scaling)
    return Deployment((model,), server=ServerOptions(port=0, log_level="warning"))


def rate(second: float) -> float:
    """Requests per second."""
    for (begin, low), (end, high) in pairwise(LOAD):
        if second < end:
            return low + (high - low) * (second - begin) / (end - begin)
    return 0.0


def arrivals(seed: int) -> list[float]:
    """A Poisson process, by thinning one with the highest rate of the load."""
    rng, most, now_s, times = random.Random(seed), max(r for _, r in LOAD), 0.0, []
    while now_s < LOAD[-1][0]:
        now_s += rng.expovariate(most)
        if rng.random() * most < rate(now_s):
            times.append(now_s)
    return times


async def ask(session: aiohttp.ClientSession, url: str, seen: Ramp) -> None:
    asked_s, last_s, tail = seen.now_s, 0.0, b""
    try:
        async with session.post(f"{url}/v1/chat/completions", json=_request()) as response:
            async for piece in response.content.iter_any():
                tail = (tail + piece)[-4096:]
                if b'"content"' not in piece and b'"reasoning' not in piece:
                    continue
                if last_s:
                    seen.longest_s = max(seen.longest_s, seen.now_s - last_s)
                else:
                    seen.first_tokens.append((asked_s, seen.now_s - asked_s))
                last_s = seen.now_s
        found = USAGE.search(tail)
        if response.status != 200 or b"[DONE]" not in tail or found is None or int(found.group(1)) != TOKENS:
            seen.failures.append(f"at {asked_s:.1f} s: {response.status}, {tail[-200:]!r}")
    except aiohttp.ClientError as error:
        seen.failures.append(f"at {asked_s:.1f} s: {error!r}")


def _request() -> dict[str, object]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me something."}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def watch(seen: Ramp) -> None:
    """Serve's own count of replicas, until cancelled."""
    while True:
        count, starting = await asyncio.to_thread(_replicas)
        now_s = seen.now_s
        if not seen.replicas or (seen.replicas[-1][1], seen.wanted[-1][1]) != (count, count + starting):
            print(f"{now_s:5.0f} s, {rate(now_s):.1f} requests/s: {count} replicas, {starting} start", flush=True)
        seen.replicas.append((now_s, count))
        seen.wanted.append((now_s, count + starting))
        await asyncio.sleep(0.5)


def _replicas() -> tuple[int, int]:
    """In service, starting."""
    from ray import serve  # Ray is imported when its surroundings are set
    from ray.serve.schema import ReplicaState

    states = serve.status().applications[app_name(MODEL, own_version())].deployments["aggregated"].replica_states
    return states.get(ReplicaState.RUNNING, 0), states.get(ReplicaState.STARTING, 0)


async def ramp(url: str, seed: int) -> Ramp:
    timeout, connector = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        seen = Ramp()
        watcher = asyncio.create_task(watch(seen))
        async with asyncio.TaskGroup() as requests:
            for at_s in arrivals(seed):
                await asyncio.sleep(max(0.0, at_s - seen.now_s))
                requests.create_task(ask(session, url, seen))
        await asyncio.sleep(max(0.0, LOAD[-1][0] - seen.now_s))
        watcher.cancel()
    return seen


def verdict(seen: Ramp) -> list[str]:
    """The failed checks."""
    counts = [count for _, count in seen.replicas]
    wrong = [f"failed {failure}" for failure in seen.failures]
    if not counts[0] == counts[-1] == 1 or max(counts) != MOST:
        wrong.append(f"{counts[0]} -> {max(counts)} -> {counts[-1]} replicas, and not 1 -> {MOST} -> 1")
    return wrong


def report(seen: Ramp) -> None:
    steps = [count for count, _ in groupby(count for _, count in seen.replicas)]
    waits = sorted(wait_s for _, wait_s in seen.first_tokens)
    print(f"{len(waits)} requests, {len(seen.failures)} failed; replicas {' -> '.join(map(str, steps))}")
    print(
        f"first tokens: median {statistics.median(waits):.2f} s, 95 % within {waits[int(0.95 * len(waits))]:.2f} s, "
        f"all within {waits[-1]:.2f} s; longest pause in an answer {seen.longest_s:.2f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=Path, default=IMAGE, help="file of the plot (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: %(default)s)")
    args = parser.parse_args()
    with Cluster(deployment()) as cluster:
        seen = asyncio.run(ramp(cluster.url, args.seed))
    report(seen)
    load = [(float(second), rate(second)) for second in range(LOAD[-1][0])]
    draw(load, seen.wanted, seen.replicas, seen.first_tokens, args.image)
    wrong = verdict(seen)
    for problem in wrong:
        print(problem)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
