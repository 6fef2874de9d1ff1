"""Sessions of several turns over replicas with small caches: the share of prefixes found, and the balance of work.

    python -m benchmarks.cluster.sessions

The engine processes and their prefix caches are real; the executor is fake. The router's own policy runs in this
process, without Ray, beside round robin and least-loaded over the same sessions. The hits of one unlimited cache are
computed from the token ids. Exits with 1 if the KV-aware router misses its targets.
"""

import argparse
import asyncio
import random
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from oscine.engine.core.prefix_index import extend_digests, root_of
from oscine.engine.process.client import EngineClient
from oscine.extensions.replicas.routing.fleet import Fleet
from oscine.extensions.replicas.routing.model_router import ModelRouter
from oscine.extensions.replicas.spec.deployment import ModelSpec, RoleSpec
from oscine.extensions.replicas.spec.placement import Placement
from oscine.extensions.replicas.spec.snapshot import ReplicaReport
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, PeerOptions, SchedulerOptions
from oscine.types import GenerationRequest, SamplingParams

HIT_LINE = 0.90  # of the hits of one unlimited cache
BALANCE_LINE = 1.3  # the busiest replica's work over the mean

PAGE = 32  # tokens
SEED = "5eed"
SYSTEM_TOKENS = 300  # that all sessions begin with
LONGEST = 3072  # tokens of a session at most
MODEL = "sessions"


@dataclass(frozen=True, slots=True)
class Turn:
    user: list[int]  # token ids that the user adds
    num_reply: int  # tokens
    think_s: float  # before it


@dataclass(frozen=True, slots=True)
class Load:
    """The same for every policy."""

    system: list[int]
    sessions: list[list[Turn]]
    replicas: int
    tokens_per_replica: int  # that its cache holds

    @property
    def num_tokens(self) -> int:
        """Of all sessions at their ends, the common beginning counted once."""
        return len(self.system) + sum(len(t.user) + t.num_reply for turns in self.sessions for t in turns)


@dataclass(slots=True)
class Outcome:
    policy: str
    found: int = 0  # prompt tokens, in the caches
    findable: int = 0  # by one cache without limits
    asked: int = 0  # prompt tokens
    work: list[int] = field(default_factory=list)  # tokens computed, by replica
    requests: list[int] = field(default_factory=list)  # by replica
    ttfts: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.found / self.findable

    @property
    def imbalance(self) -> float:
        return max(self.work) * len(self.work) / sum(self.work)


def make_load(args: argparse.Namespace) -> Load:
    rng = random.Random(args.seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(n)]

    def turn(first: bool) -> Turn:
        return Turn(tokens(rng.randint(40, 360)), rng.randint(24, 96), rng.uniform(0, 1.0 if first else 0.6))

    sessions = [[turn(i == 0) for i in range(args.turns)] for _ in range(args.sessions)]
    load = Load(tokens(SYSTEM_TOKENS), sessions, args.replicas, 0)
    per_replica = int(load.num_tokens / args.replicas * args.room)
    return Load(load.system, sessions, args.replicas, per_replica)


class Unlimited:
    """One unlimited cache: it has every page of every earlier request."""

    def __init__(self) -> None:
        self._pages: set[bytes] = set()

    def find(self, digests: list[bytes]) -> int:
        """Tokens."""
        return PAGE * next((i for i, digest in enumerate(digests) if digest not in self._pages), len(digests))

    def learn(self, digests: list[bytes]) -> None:
        self._pages.update(digests)


def digests_of(token_ids: list[int]) -> list[bytes]:
    """Digests of the whole pages before the last token, which is always computed."""
    digests: list[bytes] = []
    extend_digests(digests, token_ids, (len(token_ids) - 1) // PAGE, page_size=PAGE, root=root_of(SEED))
    return digests


# ---- policies: a placement becomes the number of a replica ----


class Policy(ABC):
    """Chooses a replica for each request, and is notified of each request's end."""

    def __init__(self, engines: list[EngineClient]) -> None:
        self.engines = engines

    @abstractmethod
    async def choose(self, placement: Placement) -> int: ...

    def done(self, replica: int) -> None:  # noqa: B027 (not every policy minds)
        pass

    async def close(self) -> None:  # noqa: B027
        pass


class RoundRobin(Policy):
    def __init__(self, engines: list[EngineClient]) -> None:
        super().__init__(engines)
        self._turns = count()

    async def choose(self, placement: Placement) -> int:
        return next(self._turns) % len(self.engines)


class LeastLoaded(Policy):
    """The replica with the fewest unfinished requests, counted exactly; equal ones in turn."""

    def __init__(self, engines: list[EngineClient]) -> None:
        super().__init__(engines)
        self._live = [0] * len(engines)
        self._turns = count()

    async def choose(self, placement: Placement) -> int:
        turn, num = next(self._turns), len(self._live)
        replica = min(range(num), key=lambda i: (self._live[i], (i - turn) % num))
        self._live[replica] += 1
        return replica

    def done(self, replica: int) -> None:
        self._live[replica] -= 1


class KVAware(Policy):
    """The router itself."""

    def __init__(self, engines: list[EngineClient]) -> None:
        super().__init__(engines)
        self._fleet = Fleet()
        for i, engine in enumerate(engines):
            assert engine.info is not None
            self._fleet.join(str(i), ReplicaReport(MODEL, endpoints=engine.info.endpoints, info=engine.info))
        self._router = ModelRouter(ModelSpec((MODEL,), (RoleSpec(),)), self._fleet, None)

    async def choose(self, placement: Placement) -> int:
        return int((await self._router.place(placement)).replica)

    async def close(self) -> None:
        await self._fleet.close()


POLICIES: dict[str, Callable[[list[EngineClient]], Policy]] = {
    "KV-aware": KVAware,
    "round robin": RoundRobin,
    "least-loaded": LeastLoaded,
}


# ---- a run ----


@asynccontextmanager
async def running(load: Load) -> AsyncIterator[list[EngineClient]]:
    """Engines with empty caches. The fake executor has the pages of max_num_seqs sequences of max_model_len."""
    max_num_seqs = load.tokens_per_replica // LONGEST
    options = EngineOptions(
        ModelOptions(max_model_len=load.tokens_per_replica // max_num_seqs),
        CacheOptions(page_size=PAGE),
        SchedulerOptions(max_num_seqs=max_num_seqs, max_num_batched_tokens=256),
        PeerOptions(host="127.0.0.1", kv_events=True, prefix_seed=SEED),
        executor="fake",
        fake_step_s=0.005,
        quiet=True,
    )
    async with AsyncExitStack() as stack:
        engines = [EngineClient(options) for _ in range(load.replicas)]
        for engine in engines:
            stack.push_async_callback(engine.stop)
            await engine.start()
        await asyncio.gather(*[engine.wait_ready() for engine in engines])
        yield engines


class Run:
    """All sessions under one policy."""

    def __init__(self, load: Load, engines: list[EngineClient], policy: Policy, outcome: Outcome) -> None:
        self._load, self._engines, self._policy, self._outcome = load, engines, policy, outcome
        self._unlimited = Unlimited()
        self._requests: Counter[int] = Counter()
        self._ids = count()

    async def all(self) -> None:
        await asyncio.gather(*[self._session(turns) for turns in self._load.sessions])
        outcome, num = self._outcome, len(self._engines)
        stats = [engine.stats for engine in self._engines]
        outcome.found = sum(s.prefix_hits for s in stats)
        outcome.work = [s.prompt_tokens - s.prefix_hits + s.generated_tokens for s in stats]
        outcome.requests = [self._requests[i] for i in range(num)]

    async def _session(self, turns: list[Turn]) -> None:
        known = list(self._load.system)
        for turn in turns:
            await asyncio.sleep(turn.think_s)
            known += turn.user
            known += await self._request(known, turn.num_reply)

    async def _request(self, prompt: list[int], num_reply: int) -> list[int]:
        outcome, name = self._outcome, f"request-{next(self._ids)}"
        asked_s = time.perf_counter()
        digests = digests_of(prompt)
        outcome.asked += len(prompt)
        outcome.findable += self._unlimited.find(digests)
        self._unlimited.learn(digests)
        replica = await self._policy.choose(Placement(name, MODEL, digests, len(prompt), num_reply))
        self._requests[replica] += 1
        sampling = SamplingParams(max_tokens=num_reply)
        reply: list[int] = []
        async with self._engines[replica].submit(GenerationRequest(name, list(prompt), sampling)) as stream:
            async for outputs in stream:
                if not reply:
                    outcome.ttfts.append(time.perf_counter() - asked_s)
                for output in outputs:
                    reply += output.token_ids
        self._policy.done(replica)
        self._unlimited.learn(digests_of(prompt + reply))
        return reply


async def measure(load: Load, name: str) -> Outcome:
    outcome = Outcome(name)
    async with running(load) as engines:
        policy = POLICIES[name](engines)
        try:
            await Run(load, engines, policy, outcome).all()
        finally:
            await policy.close()
    return outcome


def report(load: Load, outcomes: list[Outcome]) -> None:
    num_turns = len(load.sessions[0])
    print(
        f"{len(load.sessions)} sessions of {num_turns} turns, {load.num_tokens:,} tokens in the end, "
        f"{load.replicas} replicas that cache {load.tokens_per_replica:,} tokens each"
    )
    print(
        f"{'policy':14}{'hit rate':>10}{'of one cache':>14}{'busiest/mean':>14}{'TTFT mean, p95':>18}  work, requests"
    )
    for o in outcomes:
        ttfts = sorted(o.ttfts)
        late_ms = ttfts[int(0.95 * len(ttfts))] * 1e3
        ttft = f"{sum(ttfts) / len(ttfts) * 1e3:.0f}, {late_ms:.0f} ms"
        shares = f"{o.found / o.asked:10.1%}{o.share:14.1%}{o.imbalance:14.2f}"
        print(f"{o.policy:14}{shares}{ttft:>18}  {o.work}, {o.requests}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=40, help="sessions at once (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=6, help="turns per session (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=4, help="replicas of the model (default: %(default)s)")
    parser.add_argument(
        "--room",
        type=float,
        default=1.3,
        help="what all caches hold together, as a multiple of the tokens of all sessions (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: %(default)s)")
    args = parser.parse_args()
    load = make_load(args)
    outcomes = [asyncio.run(measure(load, name)) for name in POLICIES]
    report(load, outcomes)
    ours = outcomes[0]
    missed = [f"finds {ours.share:.1%} of what one cache would, which is less than {HIT_LINE:.0%}"] * (
        ours.share < HIT_LINE
    ) + [f"gives the busiest replica {ours.imbalance:.2f} times the mean, which is more than {BALANCE_LINE}"] * (
        ours.imbalance > BALANCE_LINE
    )
    for line in missed:
        print(f"the KV-aware router {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
