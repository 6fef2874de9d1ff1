"""Questions to the planner whose answers are known, for tests."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from oscine.extensions.plan.run.scenario import Scenario
from oscine.extensions.plan.search.trials import Simulate, Trial, simulate
from oscine.timing.features import pairs_of
from oscine.timing.table import Header, StepPoint, write_table

SIZES, CONTEXTS = (1, 2, 3, 4, 6, 12, 64, 1024), (64, 65_536)
TOKENS = (2, 32, 128, 512, 2048, 8192)


def write_steps(path: Path, ranks: int, step_ms: float, row_ms: float = 0.01, token_ms: float = 0.01) -> Path:
    """A table of engines with so many ranks, whose steps are sums of these times."""
    header = Header("120b", 36, 2880, "NVIDIA H200", "made up", num_gpus=ranks, tensor_parallel_size=ranks)
    points = [
        StepPoint("decode", step_ms + row_ms * rows, rows, context, sampled=rows)
        for rows in SIZES
        for context in CONTEXTS
    ]
    for tokens in TOKENS:
        ms, pairs = step_ms + token_ms * tokens, pairs_of(0, tokens)
        points.append(StepPoint("prompts", ms, tokens=tokens, pairs=pairs, sequences=1, sampled=1))
    for everything, rows, context in product(TOKENS, SIZES, CONTEXTS):
        if (tokens := everything - rows) > 0:
            ms = step_ms + row_ms * rows + token_ms * tokens
            points.append(
                StepPoint("mixed", ms, rows, context, tokens, pairs_of(0, tokens), sequences=1, sampled=rows + 1)
            )
    write_table(path, header, points)
    return path


@contextmanager
def here(note: Callable[[int], None]) -> Iterator[Simulate]:
    """Simulates in this process."""

    def all_of(scenarios: Sequence[Scenario]) -> list[Trial]:
        return [simulate(one) for one in scenarios]

    yield all_of
