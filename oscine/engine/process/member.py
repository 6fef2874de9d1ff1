"""What the supervisor of an engine needs of a group of engines that begin and end together."""

from collections.abc import Callable
from typing import Protocol

from oscine.types import RankHandle


class GroupEndedError(RuntimeError):
    """An engine of the group is given up, so no other one can serve."""


class Member(Protocol):
    """One engine of the group."""

    kill: Callable[[str], None]  # ends its process, with the reason; set by the supervisor

    async def begin(self) -> RankHandle:
        """Returns once every engine of the group is about to start. Raises GroupEndedError."""

    def end(self) -> None:
        """The process has ended, or could not be started: those of the other engines end too."""

    def leave(self) -> None:
        """The engine is not started again, and so no other one."""
