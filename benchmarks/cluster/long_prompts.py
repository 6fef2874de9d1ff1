"""Long prompts on two GPUs: one engine that prefills and one that decodes, beside two engines that do both.

    python -m benchmarks.cluster.long_prompts --model 120b --devices cuda:0 cuda:1

Both layouts use the same two engine processes with random weights; only the requests differ. Three parts:

equality    Prompts of many lengths are prefilled on one engine and decoded on the other. Then the first engine decodes
            them from its own pages. The tokens must be equal. Requests run one by one, so both engines compute the
            same, bit for bit.
transfer    The rate at which the pages of a long prompt move, from the answer of one engine to the use in the other.
load        Prompts arrive at random times (Poisson), at a share of the rate that the two engines sustain when both do
            both. Prints TTFT, tokens per second per user (after the first token), ITL, and throughput.

Exits with 1 if tokens differ.
"""

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.cluster.disaggregation import engines, read, source
from oscine.engine.process.client import EngineClient
from oscine.settings.config import NANO, CacheOptions, EngineOptions, ModelOptions, PeerOptions, SchedulerOptions
from oscine.types import GenerationRequest, SamplingParams

VOCAB = 1800  # ids below it are tokens of every model
_numbers = itertools.count()


@dataclass(frozen=True)
class Stream:
    """When the tokens of a request arrived, in seconds since it was sent."""

    times: list[float]

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


def prompt_of(num_tokens: int) -> list[int]:
    """Random tokens, different for each call, so that no prefix is cached."""
    rng = random.Random(next(_numbers))
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def greedy(name: str, prompt: list[int], num_tokens: int, prefill: EngineClient | None) -> GenerationRequest:
    where = None if prefill is None else source(prefill, min_tokens=1)
    return GenerationRequest(name, prompt, SamplingParams(num_tokens, temperature=0.0), prefill=where)


async def tokens_of(client: EngineClient, request: GenerationRequest) -> list[int]:
    return [token for output in await read(client, request) for token in output.token_ids]


async def check_equality(decode: EngineClient, prefill: EngineClient, count: int, longest: int) -> bool:
    lengths = random.Random(1)
    num_equal = 0
    for _ in range(count):
        prompt = prompt_of(lengths.randrange(100, longest))
        apart = await tokens_of(decode, greedy("apart", prompt, 32, prefill))
        alone = await tokens_of(prefill, greedy("alone", prompt, 32, None))
        num_equal += apart == alone
    print(f"prefilled on one, decoded on the other: tokens of {num_equal} of {count} requests are equal")
    return num_equal == count


async def measure_transfer(decode: EngineClient, prefill: EngineClient, num_tokens: int) -> None:
    rates = []
    for _ in range(5):
        news = (await read(decode, greedy("moved", prompt_of(num_tokens), 1, prefill)))[0].prefill
        assert news is not None
        assert news.failure is None, news.failure
        rates.append((news.num_bytes / news.transfer_s / 1e9, news))
    rate, news = sorted(rates, key=lambda found: found[0])[len(rates) // 2]
    what = f"{news.num_bytes / 1e6:.0f} MB, {news.num_full_pages} full and {news.num_sliding_pages} sliding pages"
    best = max(found[0] for found in rates)
    print(f"{what}: {1000 * news.transfer_s:.2f} ms, {rate:.1f} GB/s (median; best {best:.1f})", flush=True)


async def timed(client: EngineClient, request: GenerationRequest) -> Stream:
    began, times = time.perf_counter(), []
    async with client.submit(request) as stream:
        async for outputs in stream:
            now = time.perf_counter() - began
            times += [now] * sum(len(output.token_ids) for output in outputs)
    return Stream(times)


async def measure_load(
    name: str, serve: Callable[[int], tuple[EngineClient, EngineClient | None]], args: argparse.Namespace, rate: float
) -> float:
    """Returns requests per second. `serve`: number of a request -> its engine, and the engine that prefills it."""
    rng, tasks = random.Random(5), []
    prompts = [prompt_of(args.isl) for _ in range(args.requests)]
    began = time.perf_counter()
    at = 0.0
    for number, prompt in enumerate(prompts):
        await asyncio.sleep(began + at - time.perf_counter())
        client, prefill = serve(number)
        tasks.append(asyncio.create_task(timed(client, greedy(f"{name} {number}", prompt, args.osl, prefill))))
        at += rng.expovariate(rate) if rate else 0.0
    streams = await asyncio.gather(*tasks)
    throughput = len(streams) / (time.perf_counter() - began)
    assert all(len(stream.times) == args.osl for stream in streams)
    rates = [stream.rate for stream in streams]
    gaps = [later - earlier for stream in streams for earlier, later in pairwise(stream.times)]
    first = [stream.times[0] for stream in streams]
    print(
        f"{name:>12} at {rate or np.inf:4.2f}/s: TTFT median {np.median(first):6.2f} s; tok/s/user median "
        f"{np.median(rates):6.1f}, p10 {np.percentile(rates, 10):6.1f}; gaps p50 {1000 * np.median(gaps):5.1f} ms, p99 "
        f"{1000 * np.percentile(gaps, 99):6.1f}; {throughput:.2f} requests/s",
        flush=True,
    )
    return throughput


async def run(args: argparse.Namespace) -> bool:
    random_weights = None if args.model == NANO else args.model
    longest = max(args.isl, args.longest) + args.osl + 1
    scheduler = SchedulerOptions(max_num_seqs=64, max_num_batched_tokens=args.max_num_batched_tokens)
    cache = CacheOptions() if random_weights else CacheOptions(kv_cache_bytes=1 << 30)
    models = [
        ModelOptions(random_weights=random_weights, device=device, max_model_len=longest) for device in args.devices
    ]
    peers = PeerOptions(host="127.0.0.1", kv_transfer=True)
    options = [EngineOptions(model, cache=cache, scheduler=scheduler, peers=peers, quiet=True) for model in models]
    async with engines(*options) as (decode, prefill):
        equal = await check_equality(decode, prefill, args.equal, args.longest)
        await measure_transfer(decode, prefill, args.isl)
        both = [decode, prefill]

        def aggregated(number: int) -> tuple[EngineClient, EngineClient | None]:
            return both[number % 2], None

        def apart(_: int) -> tuple[EngineClient, EngineClient | None]:
            return decode, prefill

        sustained = await measure_load("both do both", aggregated, args, 0)
        for share in args.shares:
            for name, layout in (("both do both", aggregated), ("apart", apart)):
                await measure_load(name, layout, args, share * sustained)
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=NANO, help="120b or 20b with random weights (default: %(default)s)")
    parser.add_argument(
        "--devices",
        nargs=2,
        default=["cpu", "cpu"],
        help="devices of the engine that decodes and of the other engine (default: cpu cpu)",
    )
    parser.add_argument(
        "--equal", type=int, default=200, help="requests whose tokens are compared (default: %(default)s)"
    )
    parser.add_argument(
        "--longest", type=int, default=4000, help="most tokens of a compared prompt (default: %(default)s)"
    )
    parser.add_argument("--isl", type=int, default=32768, help="tokens per prompt of the load (default: %(default)s)")
    parser.add_argument("--osl", type=int, default=200, help="tokens generated per request (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=24, help="requests per load (default: %(default)s)")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.7], help="loads, as shares of the sustained rate (default: 0.7)"
    )
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=8192, help="most tokens per step (default: %(default)s)"
    )
    return 0 if asyncio.run(run(parser.parse_args())) else 1


if __name__ == "__main__":
    sys.exit(main())
