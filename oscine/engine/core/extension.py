"""What an extension may do in the engine: hooks of the loop. All of them do nothing by default.

At its start the loop takes, for each hook, the extensions that override it. A hook that no extension overrides costs
an empty loop.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from oscine.engine.core.kv_cache_manager import KVCacheManager
from oscine.engine.core.prefix_index import PageEvents
from oscine.engine.core.request import Request
from oscine.types import EngineInfo, EngineStats, GenerationRequest, StepPlan


class Progress(NamedTuple):
    """Steps that have ended, and that are under way; requests that run, and that wait in the scheduler."""

    num_ended: int
    num_launched: int
    num_running: int
    num_waiting: int


class EngineExtension:
    """Belongs to one loop, whose thread calls everything. Nothing here may wait."""

    fetches_prompts = False  # whether `admit` may ask another engine for the pages of a prompt

    def refusal(self, request: GenerationRequest) -> str | None:
        """Why a request cannot be run, for its sender."""
        return None

    # ---- requests that an extension holds before they are scheduled; without `admit` it is not asked for any ----

    def admit(self, request: Request) -> bool:
        """A request has just arrived, or an extension before this one has returned it. Whether it is held here."""
        return False

    def poll(self, progress: Progress) -> Sequence[Request]:
        """Requests that are held no longer. Called before each step."""
        return ()

    @property
    def requests(self) -> list[Request]:
        """Those that are held."""
        return []

    def abandon(self, request: Request) -> bool:
        """A request ends. False if it is not held here."""
        return False

    def ended(self, request: Request) -> None:
        """A request has ended, wherever it was."""

    @property
    def is_busy(self) -> bool:
        """Whether the loop must go on though it has no request."""
        return False

    # ---- steps ----

    def before_step(self, running: Collection[Request]) -> None:
        """The next step is about to be scheduled."""

    def idle_step(self) -> bool:
        """There is nothing to schedule. Whether this has run a step; raises when that failed."""
        return False

    def first_token(self, request: Request) -> None:
        """A request has its first token."""

    def after_drafts(self, request: Request, most: int, num_drafted: int, num_accepted: int) -> None:
        """A step that could verify up to `most` drafts of this request has ended."""

    def after_step(self, plan: StepPlan, num_drafted: int, seconds: float, *, in_vain: bool) -> None:
        """A step with so many drafts in all has ended. `in_vain`: none of its requests lives."""

    # ---- the engine's process ----

    def fileno(self) -> int | None:
        """A descriptor that can be read when the loop should go on; it is asked for once."""
        return None

    def describe(self, info: EngineInfo) -> EngineInfo:
        """The facts about the engine, with those of this extension."""
        return info

    def command(self, command: Any, answer: Callable[[Any], None]) -> bool:
        """A client asks for something (engine.wire.messages). Whether this extension answers, now or later."""
        return False

    def count(self, stats: EngineStats) -> None:
        """Fills in statistics of its own."""

    def announce(self) -> None:
        """The readers of KV events listen from now on."""

    def flush(self, limit_s: float) -> None:
        """The engine ends: saves what it would lose, for so long at most."""


class KVPublisher(PageEvents, Protocol):
    """Tells other processes what the prefix cache has. It collects events while a step is made and committed."""

    endpoint: str  # where subscribers connect
    replay_endpoint: str | None  # where they ask for messages that they missed

    def flush(self) -> None:
        """Publishes what has been collected, without waiting."""
        ...

    def publish_stats(self, stats: EngineStats) -> None:
        """Publishes statistics, where the readers want them."""
        ...


class LoopState(Protocol):
    """What a loop has when it makes its extensions."""

    cache: KVCacheManager
    counters: EngineStats  # everything that only grows


MakeExtension = Callable[[LoopState], EngineExtension]


def overrides(extension: EngineExtension, hook: str) -> bool:
    return getattr(type(extension), hook) is not getattr(EngineExtension, hook)


def overriding(extensions: Sequence[EngineExtension], hook: str) -> tuple[Any, ...]:
    """The bound hooks of those that override it."""
    return tuple(getattr(one, hook) for one in extensions if overrides(one, hook))
