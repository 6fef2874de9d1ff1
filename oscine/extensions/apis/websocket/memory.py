"""Responses that are not stored, kept in memory so that the next one on their connection can continue them."""

from collections import OrderedDict

from oscine.extensions.apis.responses.store import StoredResponse

MAX_BYTES = 256 << 20  # of all connections together


class RecentResponses:
    """All connections of a server. Above MAX_BYTES it forgets those that were continued the longest time ago."""

    def __init__(self, max_bytes: int | None = None) -> None:
        """`max_bytes`: None: MAX_BYTES."""
        self._max_bytes = max_bytes or MAX_BYTES
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def keep(self, response: StoredResponse) -> None:
        self.forget(response.id)
        self._kept[response.id] = response
        self.num_bytes += _size(response)
        while self.num_bytes > self._max_bytes:
            self.forget(next(iter(self._kept)))

    def get(self, response_id: str) -> StoredResponse | None:
        found = self._kept.get(response_id)
        if found is not None:
            self._kept.move_to_end(response_id)
        return found

    def forget(self, response_id: str) -> None:
        found = self._kept.pop(response_id, None)
        if found is not None:
            self.num_bytes -= _size(found)


class ConnectionMemory:
    """The responses of one connection; others do not find them."""

    def __init__(self, all_responses: RecentResponses) -> None:
        self._all, self._own = all_responses, set[str]()

    def chain(self, response_id: str) -> list[StoredResponse]:
        """The response and those before it, the oldest first, as far as they are here."""
        chain: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted in self._own and (found := self._all.get(wanted)) is not None:
            chain.append(found)
            wanted = found.previous
        return chain[::-1]

    def keep(self, response: StoredResponse) -> None:
        self._own.add(response.id)
        self._all.keep(response)

    def forget(self, response_id: str) -> None:
        if response_id in self._own:
            self._own.discard(response_id)
            self._all.forget(response_id)

    def close(self) -> None:
        for response_id in [*self._own]:
            self.forget(response_id)


def _size(response: StoredResponse) -> int:
    return len(response.body) + len(response.input)
