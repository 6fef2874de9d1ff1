"""One engine that decodes and one that prefills, as processes of their own, against one engine alone.

    python -m benchmarks.cluster.disaggregation [--requests 200] [--skip-speed]

Requests are generated, half of them greedy and half seeded. Prompts have a few tokens up to many windows. A family of
requests shares prefixes, and next turns continue an answer. Three things are checked: the tokens equal those of one
engine alone; each fetch moves exactly the missing pages, by an independent model of the cache; and no page is held on
either side at the end. Then the speed of long prompts is printed, beside NIXL alone with descriptors of the same size,
and the effect of fetches on a decoding sequence. Exits with 1 if a check fails.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

from benchmarks.cluster.nixl_alone import measure
from oscine.engine.process.client import EngineClient
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, PeerOptions, SchedulerOptions
from oscine.types import GenerationOutput, GenerationRequest, PrefillSource, SamplingParams

PAGE, WINDOW, VOCAB = 64, 128, 1800
MIN_TOKENS = 96
PAGE_BYTES = (
    3 * 2 * 2 * PAGE * 64 * 4
)  # of either group of the embedded model: layers, k and v, heads, tokens, dim, float32
FAMILY = 5  # requests, one after the other
AT_ONCE = 6  # families
# Room for everything, so that the missing pages do not depend on eviction: the sliding group has pages for the windows
# of so many sequences.
ROOMY = SchedulerOptions(max_num_seqs=256, max_num_batched_tokens=256)


def options(scheduler: SchedulerOptions = ROOMY, num_ranks: int = 1) -> EngineOptions:
    return EngineOptions(
        ModelOptions(tensor_parallel_size=num_ranks),
        cache=CacheOptions(kv_cache_bytes=1 << 30),
        scheduler=scheduler,
        peers=PeerOptions(host="127.0.0.1", kv_transfer=True),
        quiet=True,
    )


@dataclass(frozen=True)
class Case:
    """One request and its result."""

    prompt: list[int]
    sampling: SamplingParams
    outputs: list[GenerationOutput]

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]


@dataclass
class Wish:
    """A request to be made once the one before it in its family has ended."""

    own: list[int]
    continues: bool  # the conversation of the request before it, answer included
    prefix: list[int]
    sampling: SamplingParams

    def prompt(self, before: Case | None) -> list[int]:
        start = before.prompt + before.tokens if self.continues and before is not None else self.prefix
        return start + self.own


def family(number: int, size: int) -> list[Wish]:
    rng = random.Random(number)
    prefix = [rng.randrange(VOCAB) for _ in range(rng.choice((0, 40, 150, 300, 450)))]
    wishes = []
    for i in range(size):
        own = [rng.randrange(VOCAB) for _ in range(rng.choice((3, 20, 64, 130, 400)))]
        temperature = float((number + i) % 2)
        sampling = SamplingParams(max_tokens=rng.randrange(1, 40), temperature=temperature, seed=rng.randrange(1 << 30))
        wishes.append(Wish(own, rng.random() < 0.4, prefix, sampling))
    return wishes


async def read(client: EngineClient, request: GenerationRequest) -> list[GenerationOutput]:
    async with client.submit(request) as stream:
        return [output async for outputs in stream for output in outputs]


async def run_families(
    client: EngineClient, families: list[list[Wish]], prefill: PrefillSource | None
) -> list[list[Case]]:
    """Several families at once; the requests of one family run one after the other."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def run(number: int, wishes: list[Wish]) -> list[Case]:
        cases: list[Case] = []
        async with turns:
            for i, wish in enumerate(wishes):
                prompt = wish.prompt(cases[-1] if cases else None)
                request = GenerationRequest(f"{number}.{i}", prompt, wish.sampling, prefill=prefill)
                cases.append(Case(prompt, wish.sampling, await read(client, request)))
        return cases

    return await asyncio.gather(*(run(number, wishes) for number, wishes in enumerate(families)))


@dataclass
class CacheModel:
    """The pages of one family in an engine that never evicts: a page is named by all tokens up to its end."""

    full: set[tuple[int, ...]] = field(default_factory=set)
    sliding: set[tuple[int, ...]] = field(default_factory=set)

    def missing(self, prompt: list[int], *, declined: bool) -> tuple[int, int] | None:
        """Pages of both groups that must come from elsewhere; None: the prompt is computed here. `declined`: it is
        computed here although pages are missing."""
        num_pages = (len(prompt) - 1) // PAGE
        known = max(n for n in range(num_pages + 1) if self._has(prompt, n))
        if declined or known == num_pages or len(prompt) - known * PAGE < MIN_TOKENS:
            self._learn(prompt, known, num_pages)
            return None
        full = sum(_name(prompt, i) not in self.full for i in range(num_pages))
        sliding = sum(_name(prompt, i) not in self.sliding for i in _window(num_pages))
        self.full |= {_name(prompt, i) for i in range(num_pages)}
        self.sliding |= {_name(prompt, i) for i in _window(num_pages)}
        return full, sliding

    def end(self, tokens: list[int], num_prompt_pages: int) -> None:
        """A sequence has ended with these tokens; its last one was never computed."""
        self._learn(tokens, num_prompt_pages, (len(tokens) - 1) // PAGE)

    def _learn(self, tokens: list[int], first: int, end: int) -> None:
        names = {_name(tokens, i) for i in range(first, end)}
        self.full |= names
        self.sliding |= names

    def _has(self, prompt: list[int], num_pages: int) -> bool:
        return all(_name(prompt, i) in self.full for i in range(num_pages)) and all(
            _name(prompt, i) in self.sliding for i in _window(num_pages)
        )


def _name(tokens: list[int], page: int) -> tuple[int, ...]:
    return tuple(tokens[: (page + 1) * PAGE])


def _window(num_pages: int) -> range:
    """Pages in the window of the tokens after these pages."""
    return range(max(0, num_pages * PAGE - (WINDOW - 1)) // PAGE, num_pages)


@dataclass
class Verdict:
    problems: list[str] = field(default_factory=list)
    num_remote: int = 0
    num_pages: int = 0
    num_declined: int = 0  # that may be computed here, as the link was found too slow: on a busy machine it can be

    def check_tokens(self, alone: list[list[Case]], apart: list[list[Case]]) -> None:
        for i, (expected, found) in enumerate(zip(alone, apart, strict=True)):
            for j, (one, other) in enumerate(zip(expected, found, strict=True)):
                if (one.prompt, one.tokens) != (other.prompt, other.tokens):
                    self.problems.append(f"request {i}.{j}: {one.tokens} alone, {other.tokens} apart")

    def check_pages(self, apart: list[list[Case]]) -> None:
        for i, cases in enumerate(apart):
            cache = CacheModel()
            for j, case in enumerate(cases):
                news, before = case.outputs[0].prefill, CacheModel({*cache.full}, {*cache.sliding})
                expected = cache.missing(case.prompt, declined=False)
                if news is None and expected is not None and self.num_declined > 0:
                    self.num_declined -= 1
                    cache, expected = before, before.missing(case.prompt, declined=True)
                cache.end(case.prompt + case.tokens, (len(case.prompt) - 1) // PAGE)
                found = None if news is None else (news.num_full_pages, news.num_sliding_pages)
                if news is not None and news.failure is not None:
                    self.problems.append(f"request {i}.{j}: {news.failure}")
                elif found != expected:
                    self.problems.append(f"request {i}.{j}: {found} pages were moved, {expected} were missing")
                if expected is not None:
                    self.num_remote += 1
                    self.num_pages += sum(expected)
                if news is not None and news.num_bytes != PAGE_BYTES * (news.num_full_pages + news.num_sliding_pages):
                    self.problems.append(f"request {i}.{j}: {news.num_bytes} bytes")


@asynccontextmanager
async def engines(*all_options: EngineOptions) -> AsyncIterator[list[EngineClient]]:
    clients = [EngineClient(one) for one in all_options]
    try:
        for client in clients:
            await client.start()
        for client in clients:
            await client.wait_ready()
        yield clients
    finally:
        for client in clients:
            await client.stop()


def source(client: EngineClient, *, min_tokens: int = MIN_TOKENS, timeout_s: float = 120.0) -> PrefillSource:
    assert client.info is not None
    assert client.info.endpoints is not None
    return PrefillSource("prefill", client.info.endpoints.requests, min_tokens, timeout_s)


async def idle(client: EngineClient) -> None:
    """Waits until no page is held. Leases that were never released would last for minutes."""
    async with asyncio.timeout(60):
        while True:
            await read(client, GenerationRequest("look", [1], SamplingParams(max_tokens=1)))
            if client.stats.full_pages_used == client.stats.sliding_pages_used == client.stats.num_running == 0:
                return


async def check_equality(num_requests: int) -> Verdict:
    families = [family(number, FAMILY) for number in range(-(-num_requests // FAMILY))]
    verdict = Verdict()
    async with engines(options()) as (alone,):
        expected = await run_families(alone, families, None)
    async with engines(options(), options()) as (decode, prefill):
        found = await run_families(decode, families, source(prefill))
        await idle(decode)
        await idle(prefill)
        stats = decode.stats
    verdict.check_tokens(expected, found)
    verdict.num_declined = stats.fetches_declined
    verdict.check_pages(found)
    if stats.fetched_bytes != PAGE_BYTES * verdict.num_pages:
        verdict.problems.append(
            f"{stats.fetched_bytes} bytes were moved in all, {verdict.num_pages} pages were missing"
        )
    longest = max(len(case.prompt) for cases in found for case in cases)
    megabytes = f"{stats.fetched_bytes / 1e6:.1f} MB"
    print(
        f"{sum(map(len, found))} requests, prompts of up to {longest} tokens, {verdict.num_remote} prefilled elsewhere:"
    )
    print(f"{verdict.num_pages} pages, {megabytes} moved; {len(verdict.problems)} problems", flush=True)
    return verdict


# ---- speed ----


async def measure_transfers(decode: EngineClient, prefill: EngineClient) -> None:
    for num_tokens in (1024, 4096, 8000):
        rates = []
        for round_ in range(6):
            rng = random.Random(f"{num_tokens} {round_}")
            prompt = [rng.randrange(VOCAB) for _ in range(num_tokens + 1)]
            request = GenerationRequest("speed", prompt, SamplingParams(max_tokens=1), prefill=source(prefill))
            news = (await read(decode, request))[0].prefill
            assert news is not None
            assert news.failure is None, news.failure
            rates.append((news.num_bytes / news.transfer_s / 1e9, news.transfer_s, news.num_bytes))
        rate, seconds, num_bytes = max(rates)
        pages = num_bytes // PAGE_BYTES
        with_thread, without = (measure(PAGE_BYTES, pages, thread=thread) for thread in (True, False))
        print(
            f"{num_tokens} tokens, {pages} pages, {num_bytes / 1e6:.1f} MB: {1000 * seconds:.1f} ms from answer to "
            f"use, {rate:.2f} GB/s; NIXL alone {with_thread:.2f} as it comes, {without:.2f} without its thread"
        )


async def gaps(client: EngineClient, request: GenerationRequest) -> list[float]:
    """Seconds between the tokens of a stream."""
    times = []
    async with client.submit(request) as stream:
        async for outputs in stream:
            times += [time.perf_counter()] * len(outputs)
    return [later - earlier for earlier, later in pairwise(times)]


async def measure_interruption(decode: EngineClient, prefill: EngineClient) -> None:
    """The effect of prompts of 4,096 tokens, computed or fetched, on a decoding stream. The other engine has the pages
    already, so that it does not compete for the cores."""
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCAB) for _ in range(4097)] for _ in range(6)]
    for prompt in prompts[:3]:
        await read(prefill, GenerationRequest("warm", prompt, SamplingParams(max_tokens=1)))
    for name, some, apart in (
        ("nothing", [], None),
        ("3 fetched", prompts[:3], source(prefill)),
        ("3 computed", prompts[3:], None),
    ):
        stream = asyncio.create_task(
            gaps(decode, GenerationRequest("stream", [1, 2, 3], SamplingParams(max_tokens=400, seed=1)))
        )
        await asyncio.sleep(0.3)
        for i, prompt in enumerate(some):
            await read(decode, GenerationRequest(f"{i}", prompt, SamplingParams(max_tokens=1), prefill=apart))
        found = sorted(await stream)
        print(
            f"gaps between a stream's tokens beside {name}: median {1000 * statistics.median(found):.1f} ms, "
            f"99 % within {1000 * found[int(0.99 * len(found))]:.1f}, longest {1000 * found[-1]:.1f}"
        )


async def measure_speed() -> None:
    small = replace(ROOMY, max_num_seqs=4)
    here = options(small)
    # Little more than the longest prompt, because the first write to any memory is slow.
    here = replace(here, cache=replace(here.cache, kv_cache_bytes=210 * PAGE_BYTES))
    async with engines(here, options(small)) as (decode, prefill):
        await measure_transfers(decode, prefill)
        await measure_interruption(decode, prefill)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--requests", type=int, default=200, help="requests whose answers are compared (default: %(default)s)"
    )
    parser.add_argument("--skip-speed", action="store_true", help="compare answers only, and measure no speed")
    arguments = parser.parse_args()
    verdict = asyncio.run(check_equality(arguments.requests))
    for problem in verdict.problems:
        print(problem)
    if not arguments.skip_speed:
        asyncio.run(measure_speed())
    return 1 if verdict.problems else 0


if __name__ == "__main__":
    sys.exit(main())
