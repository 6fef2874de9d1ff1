"""From options to an engine that runs in this process: evaluation and benchmarks use it directly, no socket needed."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from oscine.config import EngineOptions
from oscine.engine.core.loop import EngineLoop
from oscine.executor.kv.transfers import Transfers
from oscine.executor.parallel.meeting import Seat
from oscine.executor.start.build import build_executor
from oscine.types import ModelSize

if TYPE_CHECKING:  # it needs msgspec
    from oscine.executor.parallel.processes import RankProcesses


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    loop: EngineLoop
    model: str  # as loaded
    max_model_len: int  # tokens
    vocab_size: int
    size: ModelSize = field(default_factory=ModelSize)
    transfers: Transfers | None = None  # where the options want pages to move between engines
    ranks: "RankProcesses | None" = None  # where the model has several ranks


def build_engine(options: EngineOptions, seat: Seat | None = None) -> BuiltEngine:
    """Loads the model and puts a loop over it. Raises ValueError as build_executor does."""
    built = build_executor(options, seat)
    loop = EngineLoop(
        built.executor,
        options,
        groups=built.groups,
        num_pages=built.num_pages,
        max_model_len=built.max_model_len,
        max_attended=built.max_attended,
    )
    loop.partners = built.partners
    facts = built.model, built.max_model_len, built.vocab_size, built.size
    return BuiltEngine(loop, *facts, built.transfers, built.ranks)
