"""The cost of a cluster around its models: tokens through the whole path, and the CPU time of each hop.

    python -m benchmarks.cluster.throughput [--streams 128] [--tokens 512] [--stream-interval 4]

Two aggregated replicas with fake executors behind one router and one ingress, on this machine; chat completions that
start together. The client runs in this process. Ends with status 1 if fewer than --least tokens per second arrive.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter

from benchmarks.cluster.cluster import Cluster
from benchmarks.serving.overhead import run_streams
from oscine.extensions.replicas.spec.deployment import Deployment, ModelSpec, Replicas, RoleSpec
from oscine.settings.config import EngineOptions, SchedulerOptions, ServerOptions

HOPS = ("client", "ingress", "router", "aggregated", "engine", "ray")


def deployment(args: argparse.Namespace, step_s: float) -> Deployment:
    scheduler = SchedulerOptions(max_num_seqs=args.streams, stream_interval=args.stream_interval)
    engine = EngineOptions(executor="fake", fake_step_s=step_s, scheduler=scheduler, quiet=True)
    role = RoleSpec("aggregated", engine, Replicas(args.replicas, args.replicas))
    return Deployment((ModelSpec(("fake",), (role,)),), server=ServerOptions(port=0, log_level="warning"))


def cpu_seconds(cluster: Cluster) -> Counter[str]:
    return cluster.cpu_seconds() + Counter(client=time.process_time())


def measure(cluster: Cluster, args: argparse.Namespace, step_s: float) -> float:
    """Tokens per second of the best pass; each pass is printed."""
    best = 0.0
    for _ in range(args.passes):
        cpu, started_s = cpu_seconds(cluster), time.perf_counter()
        tokens, events = asyncio.run(run_streams(cluster, args.streams, args.tokens))  # type: ignore[arg-type]
        wall_s = time.perf_counter() - started_s
        used = cpu_seconds(cluster) - cpu
        best = max(best, tokens / wall_s)
        costs = ", ".join(f"{hop} {1e6 * used[hop] / tokens:.1f}" for hop in HOPS)
        print(
            f"{args.streams} streams, step {1e3 * step_s:g} ms: {tokens / wall_s:,.0f} tokens/s, "
            f"{events / tokens:.2f} events a token; CPU us/token: {costs}",
            flush=True,
        )
    return best


def measure_requests(cluster: Cluster, count: int) -> None:
    """The cost of a request apart from its tokens: requests of one token, 32 at a time."""
    cpu, started_s = cpu_seconds(cluster), time.perf_counter()
    for _ in range(count // 32):
        asyncio.run(run_streams(cluster, 32, 1))  # type: ignore[arg-type]
    wall_s, used = time.perf_counter() - started_s, cpu_seconds(cluster) - cpu
    costs = ", ".join(f"{hop} {1e3 * used[hop] / count:.2f}" for hop in HOPS)
    print(f"{count} requests of one token: {count / wall_s:,.0f} a second; CPU ms/request: {costs}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128, help="streams at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per stream (default: %(default)s)")
    parser.add_argument(
        "--stream-interval", type=int, default=4, help="tokens per streamed event (default: %(default)s)"
    )
    parser.add_argument("--replicas", type=int, default=2, help="replicas of the model (default: %(default)s)")
    parser.add_argument(
        "--passes", type=int, default=3, help="measured passes, after one to warm up (default: %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=320, help="requests of one token (default: %(default)s)")
    parser.add_argument(
        "--step-s",
        type=float,
        default=0.0,
        help="seconds that a step of the fake executor takes (default: %(default)s)",
    )
    parser.add_argument(
        "--least",
        type=float,
        default=8000.0,
        help="tokens per second below which the exit status is 1 (default: %(default)s)",
    )
    args = parser.parse_args()
    with Cluster(deployment(args, args.step_s)) as cluster:
        asyncio.run(run_streams(cluster, args.streams, 32))  # type: ignore[arg-type]
        best = measure(cluster, args, args.step_s)
        measure_requests(cluster, args.requests)
    return int(best < args.least)


if __name__ == "__main__":
    sys.exit(main())
