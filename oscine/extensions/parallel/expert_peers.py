"""Other engines whose experts compute the tokens of this one too, as the engine loop sees them."""

from collections.abc import Callable

from oscine.engine.core.extension import EngineExtension, MakeExtension
from oscine.executor.start.build import BuiltExecutor
from oscine.extensions.parallel.lockstep import Clock
from oscine.settings.config import EngineOptions


class ExpertParallelPeers(EngineExtension):
    """The other engines of a group, as the engine loop sees them."""

    def __init__(self, clock: Clock, take_part: Callable[[], None]) -> None:
        """`take_part`: runs a step without sequences if one is awaited, after those that were launched."""
        self._clock = clock
        self._take_part = take_part

    def fileno(self) -> int:
        """Can be read while they may wait for this engine."""
        return self._clock.fileno()

    @property
    def is_busy(self) -> bool:
        """Whether they wait for this engine to take part in a step."""
        if self._clock.is_awaited:
            return True
        self._clock.rest()
        return self._clock.is_awaited

    def idle_step(self) -> bool:
        if not self.is_busy:
            return False
        self._take_part()
        return True


def of_engine(built: BuiltExecutor, options: EngineOptions) -> MakeExtension:
    assert built.expert_peers is not None
    lockstep, take_part = built.expert_peers
    return lambda loop: ExpertParallelPeers(lockstep.clock, take_part)
