"""The engine process: `python -m oscine.engine.process.server`, with a Launch record on stdin.

The process lives as long as its stdin is open, and any end of the parent closes it. A parent that has time asks it to
stop, so that its clients hear of it. Signals are left to the parent: after a ctrl-C or a SIGTERM for the whole group,
the parent drains first.
"""

import faulthandler
import gc
import signal
import sys
import time
import traceback
from dataclasses import replace

import msgspec
import zmq

from oscine.engine.build import BuiltEngine, build_engine
from oscine.engine.core.due_statistics import DueStatistics
from oscine.engine.core.extension import KVPublisher
from oscine.engine.process.parent import STACKS, Parent
from oscine.engine.process.prefills import Prefills
from oscine.engine.wire import messages as wire
from oscine.engine.wire.checks import Checks
from oscine.engine.wire.clients import Clients
from oscine.executor.start.parts import KV_EVENTS
from oscine.executor.start.torch_process import import_torch
from oscine.settings.config import EngineOptions
from oscine.system.collector import paused
from oscine.system.extensions import load, part
from oscine.types import Endpoints, EngineInfo, EngineStats, GenerationOutput, GenerationRequest, RankLostError

_Clients = Clients[wire.ToEngine]
PREFILLS = "oscine.extensions.disaggregation.prefill_service:of_engine"
_IDLE_STATS_MS = 1000  # between statistics for other processes of a cluster, while nothing runs
_FLUSH_S = 1.5  # for pages to be written to disk before an engine that was stopped ends
_FAREWELL_MS = 5000  # for the last words of a failed engine to be asked for, and to be sent

_STOPPED = 0
_FAILED_TO_START = 2
_FAILED_STEP = 3


class EngineServer:
    """Runs the loop for the clients of one socket, until a step fails or the parent asks to stop."""

    def __init__(
        self,
        clients: _Clients,
        engine: BuiltEngine,
        info: EngineInfo,
        events: KVPublisher | None,
        prefills: Prefills,
    ) -> None:
        self._clients, self._info, self._events, self._prefills = clients, info, events, prefills
        self._engine, self._loop, self._ranks = engine, engine.loop, engine.ranks
        self._checks = Checks(info.vocab_size, info.max_model_len)
        self._known: set[bytes] = set()  # clients that said hello
        self._owners: dict[str, bytes] = {}  # live request id -> client
        self._statistics = DueStatistics(time.monotonic)
        self._asleep = False
        self._wanted: tuple[bytes, bool] | None = None  # the client that wants it to sleep, or to wake, and which

    def run(self, parent: Parent) -> None:
        """Raises what a failing step or a lost rank raised, after every request was told."""
        loop, ranks = self._loop, self._ranks
        poller = _poller(self._clients, parent)
        if ranks is not None:
            poller.register(ranks, zmq.POLLIN)
        for extension in loop.extensions:
            if (descriptor := extension.fileno()) is not None:
                poller.register(descriptor, zmq.POLLIN)
        idle_ms = None if self._events is None else _IDLE_STATS_MS
        while not parent.asks_to_stop:
            self._tend_peers()
            self._sleep_or_wake()
            if not loop.has_work:
                poller.poll(self._prefills.patience_ms or idle_ms)
            for client, message in self._clients.receive():
                self._handle(client, message)
            try:
                if ranks is not None:
                    ranks.check()
                if not loop.has_work:
                    if self._events is not None:
                        self._publish(self._events, loop.stats())
                    continue
                outputs = loop.step()
            except Exception as error:
                why = str(error) if isinstance(error, RankLostError) else type(error).__name__
                self._fail(f"the engine failed ({why}) and is started again")
                raise
            self._send(outputs)
        self._say(wire.Ending("the engine was stopped", asked=True))
        self._engine.flush(_FLUSH_S)

    def _say(self, ending: wire.Ending) -> None:
        for client in self._known:
            self._clients.send(client, ending)

    def _fail(self, message: str) -> None:
        """Clients that can run requests elsewhere hear that they should before they hear what becomes of each."""
        self._say(wire.Ending(message))
        self._send(self._loop.fail_all(message))

    def _handle(self, client: bytes, message: wire.ToEngine) -> None:
        refusal = self._checks.refusal(message)
        if refusal is not None:
            self._clients.send(client, refusal)
            return
        match message:
            case wire.Hello():
                self._known.add(client)
                self._clients.send(client, wire.Outputs([], self._loop.stats()))  # how large the cache is
                self._clients.send(client, wire.Ready(self._info))
            case wire.Submit():
                self._submit(client, message.request)
            case wire.Cancel():
                if self._owners.get(message.request_id) == client:
                    self._loop.cancel(message.request_id)
            case wire.Sleep():
                self._wanted = client, message.asleep
            case wire.LoadAdapter() | wire.UnloadAdapter():
                self._command(client, message)
            case _:
                self._prefills.handle(client, message)

    def _command(self, client: bytes, command: wire.Command) -> None:
        def answer(news: wire.ToClient) -> None:
            self._clients.send(client, news)

        taken = any(extension.command(command, answer) for extension in self._loop.extensions)
        if not taken and isinstance(command, wire.LoadAdapter):
            answer(wire.AdapterNews(command.name, None, "the engine takes no adapters: see --enable-lora"))
        if not self._loop.has_work:  # no step will bring statistics
            for known in self._known:
                self._clients.send(known, wire.Outputs([], self._loop.stats()))

    def _tend_peers(self) -> None:
        """Tells other engines what became of the prompts that they wanted computed."""
        self._prefills.expire()
        news, self._prefills.news = self._prefills.news, []
        for client, message in news:
            if not self._clients.send(client, message):
                self._prefills.lose(client)

    def _sleep_or_wake(self) -> None:
        """As the newest Sleep wants it, once there is nothing else to do."""
        if self._wanted is None or (self._loop.has_work and not self._asleep):
            return
        (client, asleep), error = self._wanted, None
        self._wanted = None
        if self._engine.sleeper is None:
            error = "the engine was started without --enable-sleep-mode"
        elif asleep != self._asleep:
            try:
                self._engine.sleep() if asleep else self._engine.wake()
            except MemoryError as lacking:
                error = str(lacking)
            else:
                self._asleep = asleep
        self._clients.send(client, wire.Slept(self._asleep, error))

    def _submit(self, client: bytes, request: GenerationRequest) -> None:
        request_id = request.request_id
        if request_id in self._owners:
            error = GenerationOutput(request_id, finish_reason="error", error=f"request id {request_id!r} is in use")
            self._clients.send(client, wire.Outputs([error], None))
        elif self._asleep or self._loop.is_full:
            why = "the engine is asleep" if self._asleep else "too many requests are waiting"
            self._clients.send(client, wire.Refused(request_id, why))
        else:
            self._owners[request_id] = client
            self._loop.add(request)

    def _send(self, outputs: list[GenerationOutput]) -> None:
        by_client: dict[bytes, list[GenerationOutput]] = {}
        for output in self._prefills.take(outputs):
            by_client.setdefault(self._owners[output.request_id], []).append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
        stats = self._loop.stats() if self._statistics.are_due(has_work=self._loop.has_work) else None
        if self._events is not None:
            self._publish(self._events, stats)
        for client in list(by_client if stats is None else self._known):
            if not self._clients.send(client, wire.Outputs(by_client.get(client, []), stats)):
                self._forget(client)

    def _publish(self, events: KVPublisher, stats: EngineStats | None) -> None:
        """Before the outputs of a step are sent: the next turn of a request that ends finds the router informed."""
        events.flush()
        if stats is not None:
            events.publish_stats(stats)

    def _forget(self, client: bytes) -> None:
        self._known.discard(client)
        for request_id, owner in self._owners.items():
            if owner == client:
                self._loop.cancel(request_id)


def _open_to_peers(clients: _Clients, options: EngineOptions) -> tuple[Endpoints | None, KVPublisher | None]:
    """Raises ValueError for an endpoint that cannot be had."""
    peers = options.peers
    events: KVPublisher | None = part(KV_EVENTS)(peers, options.cache.page_size) if peers.kv_events else None
    if peers.host is None:
        return None, events
    requests = clients.listen(peers.host, peers.key)
    news = () if events is None else (events.endpoint, events.replay_endpoint)
    return Endpoints(requests, *news), events


def _prefills(engine: BuiltEngine) -> Prefills:
    """What other engines may have computed here, if pages may move between engines."""
    if engine.transfers is None:
        return Prefills()
    found: Prefills = load(PREFILLS)(engine.loop, engine.transfers)
    return found


def _serve(clients: _Clients, parent: Parent, launch: wire.Launch, started_s: float) -> int:
    """Returns the exit status."""
    try:
        endpoints, events = _open_to_peers(clients, launch.options)
        with paused():  # importing torch makes objects that stay, as does all else that is built here
            if launch.options.executor != "fake":
                import_torch()
            engine = build_engine(launch.options, launch.handle)
    except (ValueError, OSError) as error:
        return _fail(clients, parent, str(error))
    except Exception as error:
        traceback.print_exc()
        return _fail(clients, parent, f"{type(error).__name__}: {error}")
    ready_s = time.monotonic() - started_s
    info = replace(engine.info, ready_s=ready_s, endpoints=endpoints)
    if events is not None:
        engine.announce(events)
    gc.collect()
    gc.freeze()  # the collector need not look at the model's objects again in the middle of a step
    try:
        EngineServer(clients, engine, info, events, _prefills(engine)).run(parent)
    except RankLostError as error:
        print(error, file=sys.stderr)
        return _FAILED_STEP
    except Exception:
        traceback.print_exc()
        return _FAILED_STEP
    return _STOPPED


def _poller(clients: _Clients, parent: Parent) -> zmq.Poller:
    """Wakes up for messages of clients, and when the parent asks to stop."""
    poller = zmq.Poller()
    poller.register(clients.socket, zmq.POLLIN)
    poller.register(parent, zmq.POLLIN)
    return poller


def _fail(clients: _Clients, parent: Parent, message: str) -> int:
    """Tells the clients why there is no engine."""
    _poller(clients, parent).poll(_FAREWELL_MS)
    for client, _ in clients.receive():
        clients.send(client, wire.Failed(" ".join(message.split())))
    return _FAILED_TO_START


def main() -> int:
    started_s = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(STACKS, chain=True)
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=wire.Launch)
    parent = Parent(launch.address)
    clients = Clients(wire.decode_to_engine, linger_ms=_FAREWELL_MS)
    clients.socket.bind(launch.address)
    parent.listen()
    status = _serve(clients, parent, launch, started_s)
    clients.close()
    if status == _STOPPED:
        parent.leave()
    return status


if __name__ == "__main__":
    sys.exit(main())
