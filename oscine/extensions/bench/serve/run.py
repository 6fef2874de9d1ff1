"""One point of load: its requests are made, warm-up requests are answered, then the others are measured."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tqdm import tqdm

from oscine.extensions.bench.serve.arrival import Arrival
from oscine.extensions.bench.serve.drive import DONE, FAILED, TOKENS, Client, Job
from oscine.extensions.bench.serve.load import FileLoad, RandomLoad, Session, TraceLoad
from oscine.extensions.bench.serve.measure import Measures, measure
from oscine.extensions.bench.serve.processes import Outcome, run_clients


@dataclass(frozen=True, slots=True)
class Measured:
    measures: Measures
    arrival: Arrival
    energy_j: float | None  # None if the server does not say
    busy: float  # CPU time of the busiest client process over the time of the measurement


@dataclass(frozen=True, slots=True)
class Bench:
    client: Client
    load: RandomLoad | FileLoad | TraceLoad
    seed: int = 0
    num_processes: int = 1
    limits_s: dict[str, float] = field(default_factory=dict)  # of the goodput

    def run(self, arrival: Arrival, num_sessions: int, num_warm_up: int) -> Measured:
        """Raises ClientError, and ValueError or OSError for a file of requests that cannot be read."""
        sessions = self.load.sessions()
        if num_warm_up:
            closed = Arrival(arrival.concurrency or num_warm_up)
            self._answered("warm-up", itertools.islice(sessions, num_warm_up), closed)
        target = self.client.target
        before_j = target.energy_j()
        outcome = self._answered("measured", itertools.islice(sessions, num_sessions), arrival)
        after_j = target.energy_j()
        energy_j = None if before_j is None or after_j is None else after_j - before_j
        return Measured(measure(outcome.records, self.limits_s), arrival, energy_j, outcome.busy)

    def _answered(self, name: str, sessions: Iterable[Session], arrival: Arrival) -> Outcome:
        kept = list(sessions)
        offsets_s = arrival.offsets_s(len(kept), self.seed)
        jobs = [
            Job(session, self.client.request(session[0], []), offset_s)
            for session, offset_s in zip(kept, offsets_s, strict=True)
        ]
        with _progress(name, sum(map(len, kept))) as show:
            return run_clients(self.client, jobs, arrival, self.num_processes, show)


@contextmanager
def _progress(name: str, num_requests: int) -> Iterator[Callable[[list[int]], None]]:
    """A bar on stderr if that is a terminal."""
    tqdm.monitor_interval = 0  # its thread would be there when client processes are forked
    with tqdm(total=num_requests, desc=name, unit=" requests", disable=None, leave=False) as bar:

        def show(counters: list[int]) -> None:
            elapsed_s = bar.format_dict["elapsed"] or 1.0
            failed = f", {counters[FAILED]:,} failed" if counters[FAILED] else ""
            bar.set_postfix_str(f"{counters[TOKENS] / elapsed_s:,.0f} tokens/s{failed}", refresh=False)
            bar.update(counters[DONE] + counters[FAILED] - bar.n)

        yield show
