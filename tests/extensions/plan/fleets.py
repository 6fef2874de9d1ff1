"""Small deployments with step times that are whole nanoseconds, for tests of simulations."""

from collections.abc import Sequence
from itertools import islice

from oscine.extensions.bench.serve.arrival import Arrival
from oscine.extensions.bench.serve.load import Lengths, Shapes
from oscine.extensions.plan.clock.agenda import ns_of
from oscine.extensions.plan.fleet.clients import Traffic
from oscine.extensions.plan.fleet.engines import EngineSpec
from oscine.extensions.plan.fleet.simulation import Outcome, simulate
from oscine.extensions.plan.traffic.random_sessions import sessions
from oscine.extensions.replicas.spec.deployment import ModelSpec, Replicas, RoleSpec, ScalingOptions, ServiceLevels
from oscine.kv_group import KVGroup, apart
from oscine.settings.config import CacheOptions, EngineOptions, SchedulerOptions
from oscine.timing.answer import Cell
from oscine.timing.features import StepFeatures
from oscine.timing.table import Header, StepTable
from oscine.types import Role

PAGE = 64
Specs = dict[Role, EngineSpec]


class Linear:
    """So many nanoseconds per step, row, token of context and prompt token."""

    def __init__(self, step_ns: int, row_ns: int = 0, context_ns: int = 0, token_ns: int = 0) -> None:
        self.step_ns, self.row_ns, self.context_ns, self.token_ns = step_ns, row_ns, context_ns, token_ns

    def cell(self, step: StepFeatures, *, scaled: bool = False) -> Cell:
        base_ns = self.step_ns + self.row_ns * step.decode_rows + self.token_ns * step.prompt_tokens
        return Cell(base_ns * 1e-9, self.context_ns * 1e-9)


USUAL = Linear(2_000_000, 150_000, 20, 18_000)


def deployment(
    times: Linear = USUAL,
    replicas: Replicas | int = 1,
    *,
    max_num_seqs: int = 16,
    num_pages: Sequence[int] = (2000, 400),
    overlap: bool = True,
    scaling: ScalingOptions | None = None,
) -> tuple[ModelSpec, Specs]:
    """A model with full attention and a window of 128 tokens."""
    options = EngineOptions(
        cache=CacheOptions(page_size=PAGE),
        scheduler=SchedulerOptions(max_num_seqs=max_num_seqs, max_num_batched_tokens=2048, overlap=overlap),
    )
    groups = [KVGroup(window, (i,), 1, PAGE, 2, "uint8") for i, window in enumerate([None, 128])]
    table = StepTable(Header("m", 1, 1, "none", "made up"), times)
    count = Replicas(replicas, replicas) if isinstance(replicas, int) else replicas
    role = RoleSpec("aggregated", options, count)
    model = ModelSpec(("m",), (role,), ServiceLevels(ttft_s=1.0, itl_s=0.05), scaling=scaling or ScalingOptions())
    return model, {"aggregated": EngineSpec(options, groups, apart(num_pages), 16_384, table)}


def random_traffic(arrival: Arrival, count: int, shapes: Shapes | None = None, think_s: float = 0.0) -> Traffic:
    made = list(islice(sessions(shapes or Shapes(Lengths(600, 100, 0.5)), PAGE), count))
    if arrival.rate is None:
        return Traffic(made, users=arrival.concurrency or 1, think_s=think_s)
    return Traffic(made, [ns_of(offset_s) for offset_s in arrival.offsets_s(count, seed=1)], think_s=think_s)


def times(outcome: Outcome) -> list[tuple[object, ...]]:
    """Everything that a client sees, exactly."""
    return [
        (r.due_s, r.sent_s, [*r.events_s], r.prompt_tokens, r.output_tokens, r.cached_tokens, r.error)
        for r in outcome.records
    ]


__all__ = ["PAGE", "USUAL", "Linear", "deployment", "random_traffic", "simulate", "times"]
