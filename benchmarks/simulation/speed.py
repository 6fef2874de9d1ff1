"""How long two large simulations take: a rack in a closed loop, and an hour of a trace.

    python -m benchmarks.simulation.speed [--engines 72] [--requests 100000] [--trace conversation_trace.jsonl]

The rack: each engine has 694 users with some 1,024 tokens in and 1,024 out. The trace: conversations of Mooncake
(github.com/kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl, Apache-2.0) on 8 engines. Step times
are made up. Fails beyond --most-s and --most-trace-s of CPU time.
"""

import argparse
import resource
import sys
import time
from itertools import islice
from pathlib import Path

from oscine.checkpoint.hub import PUBLISHED
from oscine.extensions.bench.serve.load import Lengths, Shapes
from oscine.extensions.bench.serve.measure import measure
from oscine.extensions.plan.fleet.clients import Traffic
from oscine.extensions.plan.fleet.engines import EngineSpec
from oscine.extensions.plan.fleet.simulation import simulate
from oscine.extensions.plan.traffic.random_sessions import sessions
from oscine.extensions.plan.traffic.trace import read_trace
from oscine.extensions.replicas.spec.deployment import ModelSpec, QueueLimits, Replicas, RoleSpec
from oscine.kv_group import apart
from oscine.settings.config import EngineOptions, SchedulerOptions
from oscine.timing.answer import Cell
from oscine.timing.features import StepFeatures
from oscine.timing.table import Header, StepTable

USERS, LENGTH = 694, 131_072


class Linear:
    """Seconds per step, row, token of context, prompt token, and pair of a query and a key."""

    def __init__(self, step: float, row: float, context: float, token: float = 18e-6, pair: float = 3e-11) -> None:
        self.step, self.row, self.context, self.token, self.pair = step, row, context, token, pair

    def cell(self, step: StepFeatures, *, scaled: bool = False) -> Cell:
        prompts = self.token * step.prompt_tokens + self.pair * step.prompt_pairs
        return Cell(self.step + self.row * step.decode_rows + prompts, self.context)


def simulated(name: str, times: Linear, engines: int, seqs: int, pages: list[int], traffic: Traffic) -> float:
    """Prints what came of it. Returns the CPU time."""
    limits = SchedulerOptions(max_num_seqs=seqs, max_num_batched_tokens=8192, max_queued_tokens=1 << 40)
    options = EngineOptions(scheduler=limits)
    groups = PUBLISHED["120b"]().kv_groups(options.cache.page_size, "bfloat16")
    spec = EngineSpec(options, groups, apart(pages), LENGTH, StepTable(Header("m", 1, 1, "none", "made up"), times))
    role = RoleSpec("aggregated", options, Replicas(engines, engines))
    model = ModelSpec(("m",), (role,), queue=QueueLimits(200_000, 1e9))
    began_s, cpu_s = time.perf_counter(), time.process_time()
    outcome = simulate(model, {"aggregated": spec}, traffic)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    found, total = measure(outcome.records), outcome.total
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print(
        f"{name}: {outcome.duration_s:,.1f} s in {wall_s:.1f} s, {cpu_s:.1f} s of CPU, at most {gib:.1f} GiB; "
        f"{found.num_completed:,} requests, {found.num_failed} failed; {total.generated_tokens / 1e6:.1f} M tokens; "
        f"{total.steps:,} steps, {outcome.num_jumped:,} of them in jumps; "
        f"hits {total.prefix_hits / max(total.prefix_queries, 1):.1%}; {total.preemptions} preemptions; "
        f"TTFT p50 {found.ttft.median:.3f} s, TPOT p50 {1e3 * found.tpot.median:.2f} ms",
        flush=True,
    )
    return cpu_s


def rack(engines: int, requests: int) -> float:
    shapes = Shapes(Lengths(1024, 1024))
    traffic = Traffic(list(islice(sessions(shapes, EngineOptions().cache.page_size), requests)), users=engines * USERS)
    return simulated(f"{engines} engines", Linear(5e-3, 27e-6, 1e-9), engines, USERS, [45_000, 2_850], traffic)


def trace(path: Path) -> float:
    found = read_trace(path, EngineOptions().cache.page_size)
    fitting = [one for one in found if one.session[0].prompt_tokens + one.session[0].max_tokens < LENGTH]
    traffic = Traffic([one.session for one in fitting], [one.ns for one in fitting])
    return simulated("the trace", Linear(2e-3, 150e-6, 20e-9), 8, 512, [25_000, 6_000], traffic)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation.speed")
    parser.add_argument("--engines", type=int, default=72)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--most-s", type=float, default=120.0)
    parser.add_argument("--most-trace-s", type=float, default=30.0)
    args = parser.parse_args()
    is_quick = True
    if args.requests:
        is_quick &= rack(args.engines, args.requests) <= args.most_s
    if args.trace is not None:
        is_quick &= trace(args.trace) <= args.most_trace_s
    return 0 if is_quick else 1


if __name__ == "__main__":
    sys.exit(main())
