"""Random loads of one engine, and three ways to run them: as production does, with a cohort, with jumps."""

from dataclasses import dataclass
from random import Random
from typing import Any, Literal, NamedTuple

from oscine.engine.core.loop import EngineLoop, Parts
from oscine.engine.core.scheduler import Scheduler
from oscine.extensions.plan.clock.agenda import NEVER, Clock
from oscine.extensions.plan.engine.cohort import CohortScheduler
from oscine.extensions.plan.engine.cohort_loop import CohortLoop
from oscine.extensions.plan.engine.timed import TimedExecutor
from oscine.extensions.plan.engine.tokens import AddressedIndex, Addresses, tokens
from oscine.kv_group import KVGroup, Slots, apart
from oscine.settings.config import CacheOptions, EngineOptions, PeerOptions, SchedulerOptions
from oscine.timing.answer import Cell
from oscine.timing.features import StepFeatures
from oscine.timing.table import Header, StepTable
from oscine.types import GenerationRequest, SamplingParams

PAGE = 16
MAX_MODEL_LEN = 160
Way = Literal["production", "cohort", "jumps"]
HEADER = Header("m", 1, 1, "none", "made up")


class Kinked:
    """Times that depend on every feature. Decodes get slower by more per token where the context is long."""

    def cell(self, step: StepFeatures, *, scaled: bool = False) -> Cell:
        kink = 40 * (1 + step.decode_context // 40)
        base_s = 1e-3 + 30e-6 * step.decode_rows + 20e-6 * step.prompt_tokens + 60e-9 * step.prompt_pairs
        base_s += 1e-6 * step.sampled + 5e-7 * step.prompt_sequences
        return Cell(base_s, 3e-9 * kink, kink - 1)


TABLE = StepTable(HEADER, Kinked())


class Arrival(NamedTuple):
    ns: int
    name: str
    isl: int
    osl: int
    priority: int
    family: int  # with a common prefix
    shared: int  # pages of it


@dataclass(frozen=True)
class Load:
    options: EngineOptions
    groups: list[KVGroup]
    memory: list[Slots]
    max_attended: int | None
    arrivals: list[Arrival]
    cancels: list[tuple[int, str]]

    @classmethod
    def random(cls, seed: int) -> "Load":
        random = Random(seed)
        seqs, windows = random.randrange(1, 9), random.choice([(16,), (18,), (33,), (34,), (32,), (), (33, 18)])
        full, sliding = random.randrange(10, 20), random.randrange(4, 14)
        memory = apart([full, *[sliding] * len(windows)])
        if random.random() < 0.4:
            per_slot = tuple(random.choice([1, 1, 2, 3]) for _ in range(1 + len(windows)))
            memory = [Slots(tuple(range(len(per_slot))), per_slot, random.randrange(14, 30))]
        scheduler = SchedulerOptions(
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + random.choice([0, 1, 5, 30, 200]),
            max_waiting=random.choice([3, 100]),
            stream_interval=random.choice([1, 3, 20, NEVER, NEVER]),
            overlap=random.random() < 0.6,
        )
        options = EngineOptions(
            cache=CacheOptions(page_size=PAGE, prefix_caching=random.random() < 0.8),
            scheduler=scheduler,
            peers=PeerOptions(prefix_seed="00"),
        )
        groups = [KVGroup(window, (i,), 1, PAGE, 2, "uint8") for i, window in enumerate([None, *windows])]
        arrivals = [*_arrivals(random)]
        cancels = [(one.ns + random.randrange(1, 80_000_000), one.name) for one in arrivals if random.random() < 0.15]
        return cls(options, groups, memory, random.choice([None, None, 50, 1000]), arrivals, sorted(cancels))


def _arrivals(random: Random) -> Any:
    now_ns = 0
    for i in range(random.randrange(2, 26)):
        now_ns += random.choice([0, 0, 1, 3, 20, 60]) * 1_000_000 + random.randrange(1000)
        isl = random.choice([random.randrange(1, 110), 16, 48, 80])
        osl = random.choice([0, 1, 2, 5, random.randrange(1, 100), random.randrange(1, 100)])
        priority = random.choice([0, 0, 0, 1, -1])
        yield Arrival(now_ns, f"r{i}", isl, osl, priority, random.randrange(3), random.choice([0, 1, 3, 5]))


def addresses_of(one: Arrival) -> Addresses:
    def addresses(first: int, end: int) -> list[bytes]:
        heads = (f"{one.family}" if page < one.shared else one.name for page in range(first, end))
        return [f"{head}/{page}".encode() for head, page in zip(heads, range(first, end), strict=True)]

    return addresses


def request_of(one: Arrival) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=one.osl, temperature=0.0)
    return GenerationRequest(one.name, tokens(one.isl, addresses_of(one)), sampling, one.priority)


class Outcome(NamedTuple):
    outputs: list[tuple[Any, ...]]  # with their times
    statistics: Any
    memory: list[Any]  # free slots, order of eviction, holders, the index
    num_jumped: int


def run(load: Load, way: Way) -> Outcome:
    clock = Clock()
    made = EngineLoop if way == "production" else CohortLoop
    loop: EngineLoop = made(
        TimedExecutor(clock, TABLE),
        load.options,
        groups=load.groups,
        memory=load.memory,
        max_model_len=MAX_MODEL_LEN,
        max_attended=load.max_attended,
        parts=Parts(Scheduler if way == "production" else CohortScheduler, AddressedIndex, clock),
    )
    events: list[Any] = sorted([*load.arrivals, *load.cancels], key=lambda one: (one[0], len(one), one[1]))
    outputs: list[tuple[Any, ...]] = []
    num_jumped = steps = done = 0
    while done < len(events) or loop.has_work:
        if not loop.has_work:
            clock.ns = max(clock.ns, events[done][0])
        while done < len(events) and events[done][0] <= clock.ns:
            one, done = events[done], done + 1
            if isinstance(one, Arrival):
                loop.add(request_of(one))
            else:
                loop.cancel(one[1])
        if not loop.has_work:
            continue
        if way == "jumps" and isinstance(loop, CohortLoop):
            jumped = loop.jump(events[done][0] if done < len(events) else NEVER)
            num_jumped += jumped
            if jumped:
                continue
        steps += 1
        assert steps < 20_000, "no progress"
        for out in loop.step():
            cached = out.num_cached_tokens, out.queue_s
            outputs.append((clock.ns, out.request_id, len(out.token_ids), out.finish_reason, out.error, *cached))
    pools = [(pool._holders, [*pool._loose], [*pool._stranded], pool.num_growing) for pool in loop.cache.pools]
    arenas = [(arena._free, [*arena._cold], [*arena._kept]) for _, arena in loop.cache.pools._arenas]
    return Outcome(outputs, loop.stats(), [pools, arenas, loop.cache.index._pages], num_jumped)


class Proof(NamedTuple):
    num_preemptions: int
    num_jumped: int


def prove(seeds: range) -> Proof:
    """Every load has the same outcome with jumps, and every fourth one also without, as in production."""
    num_preemptions = num_jumped = 0
    for seed in seeds:
        load = Load.random(seed)
        expected = run(load, "production")
        ways: tuple[Way, ...] = ("jumps",) if seed % 4 else ("cohort", "jumps")
        for way in ways:
            found = run(load, way)
            for what, theirs, ours in zip(Outcome._fields[:3], expected, found, strict=False):
                assert ours == theirs, f"load {seed} differs in its {what}, by {way}"
            num_jumped += found.num_jumped
        num_preemptions += expected.statistics.preemptions
    return Proof(num_preemptions, num_jumped)


if __name__ == "__main__":  # make sim, make sim-long
    import sys

    first, count = int(sys.argv[1]), int(sys.argv[2])
    print(f"{count} loads are equal: {prove(range(first, first + count))}")
