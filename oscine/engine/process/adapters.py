"""The low-rank adapters of an engine process, as its client knows them. They are loaded again when it is restarted."""

import asyncio
from collections.abc import Callable

from oscine.engine.wire.messages import AdapterNews, Command, LoadAdapter, UnloadAdapter
from oscine.engine.wire.stream import EngineDied
from oscine.types import AdapterInfo, EngineInfo


class ClientAdapters:
    """Belongs to one event loop."""

    def __init__(self, send: Callable[[Command], None]) -> None:
        self.by_name: dict[str, AdapterInfo] = {}
        self._send = send
        self._loading: dict[str, asyncio.Future[AdapterInfo]] = {}
        self._num_loads = 0
        self._unheard: set[int] = set()  # loads without news
        self._added: dict[str, str] = {}  # those that were not there at the start: name -> folder
        self._forgotten: set[str] = set()  # names of those that were

    async def load(self, name: str, path: str, in_place: bool = False) -> AdapterInfo:
        """`in_place`: another adapter may have the name. Raises ValueError, in one line, for one that cannot be loaded,
        and EngineDied."""
        if (name in self.by_name and not in_place) or name in self._loading:
            raise ValueError(f"there is an adapter {name!r} already")
        coming: asyncio.Future[AdapterInfo] = asyncio.get_running_loop().create_future()
        self._loading[name] = coming
        self._send_load(name, path)
        try:
            return await coming
        finally:
            self._loading.pop(name, None)

    def _send_load(self, name: str, path: str) -> None:
        self._unheard.add(self._num_loads)
        self._send(LoadAdapter(name, path, self._num_loads))
        self._num_loads += 1

    def forget(self, name: str) -> AdapterInfo:
        """Frees a name. Raises KeyError."""
        info = self.by_name.pop(name)
        self._added.pop(name, None)
        self._forgotten.add(name)  # also one of the start, which another one may have replaced
        return info

    def drop(self, identity: str) -> None:
        """No request needs the adapter any more, unless it has another name."""
        if all(info.identity != identity for info in self.by_name.values()):
            self._send(UnloadAdapter(identity, tuple(self._unheard)))

    # ---- what the engine says ----

    def ready(self, info: EngineInfo) -> None:
        """It has started, perhaps again. Adapters that were added keep their names while they are read again."""
        self._unheard.clear()
        there = {adapter.name: adapter for adapter in info.adapters or ()}
        added = {name: self.by_name[name] for name in self._added}
        self.by_name = {name: one for name, one in there.items() if name not in self._forgotten} | added
        for identity in {one.identity for one in there.values()}:
            self.drop(identity)  # before others are loaded, as --max-cpu-loras counts it
        for name, path in self._added.items():
            self._send_load(name, path)

    def hear(self, news: AdapterNews) -> None:
        self._unheard.discard(news.number)
        coming = self._loading.get(news.name)
        if news.info is not None and (coming is not None or news.name in self._added):
            self.by_name[news.name], self._added[news.name] = news.info, news.info.path
        elif news.info is not None:  # its name was freed meanwhile
            self.drop(news.info.identity)
        elif coming is None and news.name in self._added:  # it could not be loaded again
            del self._added[news.name], self.by_name[news.name]
            self._forgotten.add(news.name)
        if coming is not None and not coming.done():
            if news.info is None:
                coming.set_exception(ValueError(news.error))
            else:
                coming.set_result(news.info)

    def fail(self, error: str) -> None:
        """The engine has ended."""
        for coming in self._loading.values():
            if not coming.done():
                coming.set_exception(EngineDied(error))
