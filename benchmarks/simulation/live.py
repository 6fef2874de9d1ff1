"""A live run beside its simulation: two engines with fake executors, router and client, and the same arrivals.

    python -m benchmarks.simulation.live [--requests 300] [--rate 12]

The fake executors sleep as long as a table of step times says (`--fake-steps`), and the simulation has the same table.
Fails if TTFT (p50, p90) or TPOT (p50) differ by more than 5 % and 3 ms. The machine should have little else to do.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np

from oscine.checkpoint.hub import config_at, find_model
from oscine.extensions.bench.serve.arrival import Arrival
from oscine.extensions.bench.serve.load import Lengths, Shapes
from oscine.extensions.plan.clock.agenda import ns_of
from oscine.extensions.plan.fleet.clients import Traffic
from oscine.extensions.plan.fleet.engines import EngineSpec
from oscine.extensions.plan.fleet.simulation import simulate
from oscine.extensions.plan.traffic.random_sessions import sessions
from oscine.extensions.plan.traffic.session import Session
from oscine.extensions.replicas.data_parallel import DataParallelEngine
from oscine.extensions.replicas.spec.deployment import ModelSpec, Replicas, RoleSpec
from oscine.kv_group import apart
from oscine.settings.config import EngineOptions, ModelOptions, SchedulerOptions
from oscine.timing.read import read_table
from oscine.timing.table import Header, StepPoint, write_table
from oscine.types import GenerationRequest, SamplingParams

SEQS, LENGTH, ENGINES = 64, 4096, 2
SHARE, SLACK_S = 0.05, 0.003  # of a difference
Times = tuple[list[float], list[float]]  # TTFT, TPOT


def table(path: Path) -> None:
    """Steps of some 6 to 10 ms; a prompt token takes 18 us."""

    def ms(rows: int, tokens: int = 0) -> float:
        return 6 + 0.06 * rows + 0.018 * tokens

    points = [StepPoint("decode", ms(rows), rows=rows, context=1, sampled=rows) for rows in (1, SEQS)]
    points += [StepPoint("prompts", ms(0, n), tokens=n, pairs=n, sequences=1, sampled=1) for n in (16, 2048)]
    for rows in (1, SEQS):
        for n in (16, 2048):
            sampled = rows + 1
            points.append(
                StepPoint("mixed", ms(rows, n), rows=rows, context=1, tokens=n, pairs=n, sequences=1, sampled=sampled)
            )
    write_table(path, Header("fake", 1, 1, "none", "made up"), points)


def simulated(options: EngineOptions, asked: Sequence[Session], offsets_s: Sequence[float]) -> Times:
    groups = config_at(find_model(options.model)).kv_groups(options.cache.page_size, "uint8")
    memory = apart([SEQS * LENGTH // options.cache.page_size] * len(groups))
    assert options.fake_steps is not None
    spec = EngineSpec(options, groups, memory, LENGTH, read_table(Path(options.fake_steps), scaled=True))
    role = RoleSpec("aggregated", options, Replicas(ENGINES, ENGINES))
    traffic = Traffic(asked, [ns_of(offset_s) for offset_s in offsets_s])
    records = simulate(ModelSpec(("m",), (role,)), {"aggregated": spec}, traffic).records
    tpot = [(r.events_s[-1] - r.events_s[0]) / (r.output_tokens - 1) for r in records]
    return [record.events_s[0] - record.sent_s for record in records], tpot


async def live(options: EngineOptions, asked: Sequence[Session], offsets_s: Sequence[float]) -> Times:
    engine = DataParallelEngine([options] * ENGINES, "m")
    await engine.start()
    try:
        await asyncio.gather(*(one.wait_ready() for one in engine.engines.values()))
        await engine.wait_ready()
        await _answered(engine, "warm-up", -1, 100, 20)
        begin_s = time.perf_counter()

        async def client(number: int, session: Session, offset_s: float) -> tuple[float, float]:
            await asyncio.sleep(begin_s + offset_s - time.perf_counter())
            (turn,) = session
            return await _answered(engine, str(number), number, turn.prompt_tokens, turn.max_tokens)

        waits = (client(i, *one) for i, one in enumerate(zip(asked, offsets_s, strict=True)))
        ttft, tpot = zip(*await asyncio.gather(*waits), strict=True)
        return [*ttft], [*tpot]
    finally:
        await engine.stop()


async def _answered(engine: DataParallelEngine, name: str, number: int, isl: int, osl: int) -> tuple[float, float]:
    """TTFT and TPOT of a prompt of its own."""
    prompt = Random(number).choices(range(200), k=isl)
    sent_s, first_s, count = time.perf_counter(), 0.0, 0
    async with engine.submit(
        GenerationRequest(name, prompt, SamplingParams(max_tokens=osl, temperature=0.0))
    ) as stream:
        async for outputs in stream:
            first_s = first_s or time.perf_counter()
            count += sum(len(output.token_ids) for output in outputs)
    assert count == osl
    return first_s - sent_s, (time.perf_counter() - first_s) / (osl - 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation.live")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=12.0)
    args = parser.parse_args()
    shapes = Shapes(Lengths(700, 100, 0.8), seed=3)
    asked = list(islice(sessions(shapes, EngineOptions().cache.page_size), args.requests))
    offsets_s = Arrival(rate=args.rate).offsets_s(args.requests, seed=3)
    with tempfile.TemporaryDirectory() as folder:
        table(path := Path(folder) / "steps.jsonl")
        options = EngineOptions(
            ModelOptions(max_model_len=LENGTH),
            scheduler=SchedulerOptions(max_num_seqs=SEQS, max_num_batched_tokens=2048),
            executor="fake",
            fake_steps=str(path),
            quiet=True,
        )
        expected, found = simulated(options, asked, offsets_s), asyncio.run(live(options, asked, offsets_s))
    is_good = True
    for name, place, share in (("TTFT p50", 0, 50), ("TTFT p90", 0, 90), ("TPOT p50", 1, 50)):
        virtual_s, real_s = (float(np.percentile(times[place], share)) for times in (expected, found))
        is_near = abs(real_s - virtual_s) <= SHARE * real_s + SLACK_S
        is_good &= is_near
        verdict = "" if is_near else "  too far apart"
        print(f"{name}: simulated {1e3 * virtual_s:.2f} ms, live {1e3 * real_s:.2f} ms{verdict}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
