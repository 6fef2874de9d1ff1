"""A pool of replicas as a queue: requests arrive at random, wait, have their prompts computed, decode side by side.

Independent of the policy: it simulates a real pool and the reports of its replicas, in four steps per second. Replicas
take time to start; stopped ones give their requests to the others.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from oscine.extensions.cluster.scaling.policy import Bounds, Decision, Goals, State, decide
from oscine.extensions.cluster.scaling.pool_load import GAUGE_S, LOOK_BACK_S, PoolLoad, ReplicaLoad

STEP_S = 0.25


@dataclass(frozen=True)
class Machine:
    """A replica."""

    slots: int = 16
    constant_s: float = 0.02  # of a decode step
    each_s: float = 0.002  # further, for each sequence
    prompt_tokens_s: float = 8000.0
    start_s: float = 8.0


@dataclass(frozen=True)
class Work:
    """A request: means of exponential distributions."""

    prompt: float = 400.0
    output: float = 200.0


@dataclass
class Moment:
    """What is reported of a quarter of a second."""

    running: float
    waiting: float
    queued_tokens: float
    computed: float
    first: int
    inter: float
    inter_s: float


@dataclass
class Simulation:
    machine: Machine
    work: Work
    goals: Goals
    bounds: Bounds
    rate: Callable[[float], float]  # requests/s at a time
    seed: int = 0
    noise: float = 0.1  # relative, of each replica's gauges and sums
    silent: Callable[[float], bool] = lambda now_s: False  # times at which one replica does not report
    ready: int = 1
    now_s: float = 0.0
    state: State = field(default_factory=State)
    targets: list[tuple[float, int]] = field(default_factory=list)  # (time, replicas wanted), one a second
    decisions: list[tuple[float, Decision]] = field(default_factory=list)  # changes
    waits: list[tuple[float, float]] = field(default_factory=list)  # (time, seconds to a first token)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.target = self.ready
        self.starting: list[float] = []  # when each is ready
        self.queue: deque[list[float]] = deque()  # [arrival, tokens of the prompt left]
        self.running = 0  # sequences that decode
        self.moments: deque[Moment] = deque(maxlen=int(LOOK_BACK_S / STEP_S))

    def run(self, seconds: float) -> "Simulation":
        for step in range(int(seconds / STEP_S)):
            self.now_s = step * STEP_S
            self._replicas()
            self._arrive()
            self._work()
            if step % 4 == 0:
                self._scale()
        return self

    def reversals(self, since_s: float = 0.0) -> int:
        """Steps up after steps down."""
        values = [target for now_s, target in self.targets if now_s >= since_s]
        moves = [after - before for before, after in pairwise(values) if after != before]
        return sum(1 for before, after in pairwise(moves) if before < 0 < after)

    def at(self, now_s: float) -> int:
        return next(target for time_s, target in reversed(self.targets) if time_s <= now_s)

    def _replicas(self) -> None:
        done = [when for when in self.starting if when <= self.now_s]
        self.starting = [when for when in self.starting if when > self.now_s]
        self.ready += len(done)
        wanted = self.target - self.ready - len(self.starting)
        self.starting += [self.now_s + self.machine.start_s] * max(wanted, 0)
        while self.ready + len(self.starting) > self.target:
            if self.starting:
                self.starting.pop()
            else:
                self.ready -= 1

    def _arrive(self) -> None:
        for _ in range(self.random.poisson(self.rate(self.now_s) * STEP_S)):
            self.queue.append([self.now_s, max(1.0, self.random.exponential(self.work.prompt))])

    def _work(self) -> None:
        budget, computed, waits = self.ready * self.machine.prompt_tokens_s * STEP_S, 0.0, []
        while budget > 0 and self.queue and self.running < self.ready * self.machine.slots:
            part = min(budget, self.queue[0][1])
            self.queue[0][1] -= part
            budget, computed = budget - part, computed + part
            if self.queue[0][1] <= 0:
                waits.append(self.now_s + STEP_S - self.queue.popleft()[0])
                self.running += 1
        self.waits += [(self.now_s, wait_s) for wait_s in waits]
        itl_s = self.machine.constant_s + self.machine.each_s * self.running / max(self.ready, 1)
        tokens = self.running * STEP_S / itl_s if self.ready else 0.0
        self.running -= min(self.running, int(self.random.poisson(tokens / self.work.output)))
        self.moments.append(
            Moment(
                self.running,
                len(self.queue),
                sum(left for _, left in self.queue),
                computed,
                len(waits),
                tokens,
                tokens * itl_s,
            )
        )

    def _scale(self) -> None:
        decision = decide(self._load(), self.target, self.bounds, self.goals, self.state)
        self.state = decision.state
        if decision.replicas != self.target:
            self.decisions.append((self.now_s, decision))
        self.target = decision.replicas
        self.targets.append((self.now_s, self.target))

    def _load(self) -> PoolLoad:
        replicas = tuple(self._replica() for _ in range(self.ready))
        if replicas and self.silent(self.now_s):
            replicas = replicas[1:]
        return PoolLoad(self.now_s, self.ready, replicas, queued=float(len(self.queue)) if not self.ready else 0.0)

    def _replica(self) -> ReplicaLoad:
        """An even share, more or less."""
        recent = list(self.moments)[-int(GAUGE_S / STEP_S) :]
        share = max(0.0, self.random.normal(1.0, self.noise)) / self.ready
        waiting = share * sum(m.waiting for m in recent) / len(recent)
        here = min(waiting, max(4.0, self.machine.slots // 4))  # the router holds the others back
        part = here / waiting if waiting else 1.0
        running = share * sum(m.running for m in recent) / len(recent)
        return ReplicaLoad(
            running=min(running, self.machine.slots),
            waiting=here,
            queued_tokens=part * share * sum(m.queued_tokens for m in recent) / len(recent),
            kv_usage=min(1.0, 0.8 * running / self.machine.slots),
            least_queued_tokens=part * share * min(m.queued_tokens for m in self.moments),
            most_running=min(self.machine.slots, max(m.running for m in self.moments) / self.ready),
            max_num_seqs=self.machine.slots,
            window_s=len(self.moments) * STEP_S,
            asked_tokens=share * sum(m.computed for m in self.moments),
            first_tokens=share * sum(m.first for m in self.moments),
            inter_tokens=share * sum(m.inter for m in self.moments),
            inter_token_s=share * sum(m.inter_s for m in self.moments),
            held_back=max(0.0, self.moments[-1].waiting - self.ready * here),
            held_back_s=self.now_s,
        )
