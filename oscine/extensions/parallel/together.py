"""Engine processes that begin and end together: each computes a part of the experts for all of them."""

import asyncio
from collections.abc import Callable

from oscine.engine.process.member import GroupEndedError
from oscine.extensions.parallel.rendezvous import Rendezvous
from oscine.types import RankHandle

_FAREWELL_S = 5.0  # granted to the others once one has ended: they notice it at their next step


class EngineGroup:
    """One life of the group is one rendezvous: it begins when no process of the last life runs any more."""

    def __init__(self, size: int) -> None:
        self.members = [_Member(self, rank) for rank in range(size)]
        self._about_to_start: dict[int, asyncio.Future[RankHandle]] = {}
        self._left: set[int] = set()
        self._rendezvous: Rendezvous | None = None

    async def begin(self, rank: int) -> RankHandle:
        """Returns once every engine is about to start. Raises GroupEndedError."""
        if self._left:
            raise GroupEndedError("another engine that has a part of the experts is given up")
        handle: asyncio.Future[RankHandle] = asyncio.get_running_loop().create_future()
        self._about_to_start[rank] = handle
        if len(self._about_to_start) == len(self.members):
            self._close()
            self._rendezvous = Rendezvous(len(self.members))
            for other, future in self._about_to_start.items():
                if not future.done():  # of one that is stopped meanwhile
                    future.set_result(self._rendezvous.handle(other))
            self._about_to_start = {}
        return await handle

    def end(self, rank: int) -> None:
        """Ends the life of the group: its process has ended."""
        if self._rendezvous is not None:
            self._rendezvous.lose(rank)
            asyncio.get_running_loop().call_later(_FAREWELL_S, self._kill, self._rendezvous, rank)

    def leave(self, rank: int) -> None:
        """The engine is not started again."""
        self._left.add(rank)
        waiting, self._about_to_start = self._about_to_start, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(GroupEndedError("another engine that has a part of the experts is given up"))
        if len(self._left) == len(self.members):
            self._close()

    def _kill(self, rendezvous: Rendezvous, rank: int) -> None:
        if rendezvous is self._rendezvous:
            for member in self.members:
                member.kill(f"engine {rank}, which had a part of the experts, ended")

    def _close(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None


class _Member:
    """A Member of the group."""

    def __init__(self, group: EngineGroup, rank: int) -> None:
        self._group, self._rank = group, rank
        self.kill: Callable[[str], None] = lambda reason: None  # set by the supervisor

    async def begin(self) -> RankHandle:
        return await self._group.begin(self._rank)

    def end(self) -> None:
        self._group.end(self._rank)

    def leave(self) -> None:
        self._group.leave(self._rank)
