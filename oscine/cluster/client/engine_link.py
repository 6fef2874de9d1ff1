"""An ingress's connection to one life of one engine, shared by all requests that run there.

It tracks the requests that the engine has; the owner decides what happens to requests that the engine has lost.
"""

import asyncio
import time
from typing import Protocol

import zmq

from oscine.cluster.client.live_request import LiveRequest
from oscine.cluster.spec.placement import Place
from oscine.engine.wire.links import Link
from oscine.engine.wire.messages import (
    Cancel,
    Ending,
    Failed,
    Hello,
    Outputs,
    Ready,
    Refused,
    Submit,
    ToClient,
    decode_to_client,
)
from oscine.types import EngineStats, GenerationOutput

_CONNECT_S = 5.0  # to hear from the engine at the other end
_IDLE_S = 300.0  # without requests before the connection is given up


class LinkOwner(Protocol):
    """Receives the events of a link. None comes after `link_closed`."""

    def refused(self, link: "EngineLink", live: LiveRequest, message: str) -> None:
        """The engine is full."""
        ...

    def ended(self, live: LiveRequest) -> None:
        """The request got its last output."""
        ...

    def reported(self, link: "EngineLink", stats: EngineStats) -> None: ...

    def link_closed(self, link: "EngineLink", error: str | None, requests: list[LiveRequest]) -> None:
        """`requests` have ended there. Without an error, the link was idle for long."""
        ...


class EngineLink:
    """Opened by the first request that is placed there."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], place: Place, owner: LinkOwner, key: str = "") -> None:
        """Raises ZMQError if the connection is impossible. `key`: see oscine.engine.wire.tcp."""
        self.replica, self.address = place.replica, place.address
        self.was_up = False
        self.broke = False  # once it is closed: whether the engine ended unasked
        self.heard_s = time.monotonic()
        self._owner = owner
        self._requests: dict[str, LiveRequest] = {}  # by their ids in the engine
        self._loop = asyncio.get_running_loop()
        hear = self._on_up, self._receive, self._on_down
        self._link = Link(context, place.address, decode_to_client, *hear, key=key, patient=False)
        self._timer = self._loop.call_later(_CONNECT_S, self._close, "the engine cannot be reached")
        self._link.send(Hello())  # goes first, so that the engine knows whom to tell of its end

    def submit(self, live: LiveRequest, place: Place) -> None:
        live.link = self
        request = live.for_engine(place.prefill)
        self._requests[request.request_id] = live
        self._mind_idleness()
        self._link.send(Submit(request))

    def cancel(self, live: LiveRequest) -> None:
        self._forget(live.engine_id)
        self._link.send(Cancel(live.engine_id))

    def shut(self) -> list[LiveRequest]:
        """Closes without an event for the owner. Returns its requests."""
        self._timer.cancel()
        self._link.close()
        requests, self._requests = list(self._requests.values()), {}
        return requests

    def _forget(self, engine_id: str) -> LiveRequest | None:
        live = self._requests.pop(engine_id, None)
        if not self._requests:
            self._mind_idleness()
        return live

    def _mind_idleness(self) -> None:
        """The timer is that of the connection until there is one."""
        if self.was_up:
            self._timer.cancel()
            if not self._requests:
                self._timer = self._loop.call_later(_IDLE_S, self._close, None)

    def _close(self, error: str | None, *, asked: bool = False) -> None:
        self.broke = self.was_up and error is not None and not asked
        self._owner.link_closed(self, error, self.shut())

    # ---- what the link reports ----

    def _on_up(self) -> None:
        self.was_up = True
        self._mind_idleness()

    def _on_down(self) -> None:
        self._close("the connection to the engine broke")

    def _receive(self, message: ToClient) -> None:
        self.heard_s = time.monotonic()
        match message:
            case Outputs():
                self._deliver(message.outputs)
                if message.stats is not None:
                    self._owner.reported(self, message.stats)
            case Refused():
                live = self._forget(message.request_id)
                if live is not None:
                    self._owner.refused(self, live, message.message)
            case Ending():
                self._close(message.message, asked=message.asked)
            case Failed():
                self._close(message.message)
            case Ready():
                pass

    def _deliver(self, outputs: list[GenerationOutput]) -> None:
        requests = self._requests
        for output in outputs:
            live = requests.get(output.request_id)
            if live is None:
                continue  # cancelled while the output was under way
            finished = output.finish_reason is not None
            if finished:
                self._forget(output.request_id)
            live.take(output)
            if finished:
                self._owner.ended(live)
