"""Runs the application on uvicorn: binds, starts the service, drains on SIGTERM, stops."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, cast

import uvicorn

from oscine.api.apis import make_service
from oscine.api.app import create_app, open_paths, websocket_paths
from oscine.api.common.errors import APIError
from oscine.api.common.record import RequestRecord
from oscine.api.http.tls_listener import TlsListener
from oscine.api.http.uvicorn_protocol import protocol
from oscine.api.http.websocket import PING_S
from oscine.api.port_file import PortFile
from oscine.api.serving.placement import place
from oscine.api.serving.service import Service
from oscine.api.telemetry.loop_lag import measure_lag
from oscine.api.telemetry.observe import note
from oscine.engine.process.client import EngineError
from oscine.engine.process.descriptors import connection_limit, raise_descriptor_limit
from oscine.settings.config import Config
from oscine.system.addresses import is_loopback
from oscine.system.collector import collect_when_quiet
from oscine.system.freed_memory import return_freed_memory
from oscine.types import EngineInfo

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than the usual minute of a proxy in front, so that the proxy closes first
_POLL_S = 0.02  # while the server waits to listen
_HAND_OVER_S = 1.0  # for requests on connections that came just before the port was left to others
_MAX_DIGITS = 640  # of an integer in JSON: reading a longer one takes quadratic time
_SWITCH_S = 0.001  # after which a thread with a large request lets the event loop run
_CLOSE_S = 2  # for connections that are still busy after the drain
_END_S = 15.0  # from the end of the drain to the end of the process, even if threads are still busy


class ServerError(Exception):
    """The server could not start; the message is one line."""


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Raises ServerError when the address cannot be had. Processes that all reuse a port share its connections."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        hint = "; another server may run there: --port names another port" if error.errno == errno.EADDRINUSE else ""
        raise ServerError(f"cannot listen on {host} port {port}: {error.strerror or error}{hint}") from None
    return listener


def _no_port_file(path: str | None, error: OSError) -> str:
    return f"--port-file {path}: {error.strerror or error}"


def _max_connections(wanted: int) -> int:
    descriptors = raise_descriptor_limit()
    limit = connection_limit(wanted, descriptors)
    if limit < wanted:
        logger.warning("connections are limited to %d, as this process may open only %d files", limit, descriptors)
    return limit


def one_model(config: Config) -> Service:
    """The service of `oscine serve`. Raises ValueError as make_service does."""
    service = make_service(config)
    place(service, config)
    return service


class Server(uvicorn.Server):
    """Serves all endpoints. SIGTERM or SIGINT drain it, a second one ends the drain at once; SIGHUP rereads the keys.

    In a thread other than the main one there are no signals: call `request_stop` through the loop instead.
    """

    def __init__(
        self,
        config: Config,
        service: Service | None = None,
        *,
        reuse_port: bool = False,
        before_listening: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`service` is one with models of its own; without it there is one model, whose engine the server runs.

        With `reuse_port` other servers may have the port, too: one that goes leaves it to them before it drains.
        `before_listening` is awaited while the service starts; a server that is stopped meanwhile never listens.
        """
        options = config.server
        try:
            self.service = service or one_model(config)
        except ValueError as error:
            raise ServerError(str(error)) from None
        sys.set_int_max_str_digits(_MAX_DIGITS)
        sys.setswitchinterval(_SWITCH_S)
        self._shares_port, self._before_listening = reuse_port, before_listening
        self.listener = bind(options.host, options.port, reuse_port=reuse_port)
        self.error: str | None = None  # why the service could not start
        self.owns_process = False  # then the process is ended within _END_S
        self._drain: asyncio.Task[None] | None = None
        self._is_leaving = False  # to others that have the port
        super().__init__(
            uvicorn.Config(
                create_app(self.service),
                loop="uvloop",
                ws="none",  # the HTTP protocol makes WebSockets itself
                ws_max_size=options.max_body_bytes,
                ws_per_message_deflate=False,
                ws_ping_interval=PING_S,
                ws_ping_timeout=None,
                lifespan="off",
                log_config=None,
                access_log=logging.getLogger("uvicorn.access").isEnabledFor(logging.DEBUG),
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_CLOSE_S,
                ssl_certfile=options.ssl_certfile,
                ssl_keyfile=options.ssl_keyfile,
            )
        )
        self._load_certificates()
        self._port_file = self._open_port_file()
        self._make_protocol = protocol(
            _max_connections(options.max_connections),
            probes=open_paths(self.service),
            websockets=websocket_paths(self.service),
            bodies=self.service.bodies,
            on_refused=self._note_refused,
            is_leaving=lambda: self._is_leaving,
        )
        self.config.http_protocol_class = cast(Any, self._make_protocol)  # uvicorn calls it only
        self.service.metrics.watch_connections(lambda: len(self.server_state.connections))

    def _load_certificates(self) -> None:
        try:
            self.config.load()
        except OSError as error:  # as ssl.SSLError is
            self.listener.close()
            files = f"--ssl-certfile {self.config.ssl_certfile}"
            if self.config.ssl_keyfile is not None:
                files += f", --ssl-keyfile {self.config.ssl_keyfile}"
            raise ServerError(f"{files}: {error.strerror or error}") from None

    def _open_port_file(self) -> PortFile | None:
        path = self.service.config.server.port_file
        try:
            return None if path is None else PortFile(path)
        except OSError as error:
            self.listener.close()
            raise ServerError(_no_port_file(path, error)) from None

    @property
    def url(self) -> str:
        """For clients on this machine."""
        host = self.listener.getsockname()[0]
        return self._url_of({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host))

    def _url_of(self, host: str) -> str:
        port = self.listener.getsockname()[1]
        scheme = "https" if self.config.is_ssl else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def run_service(self, on_ready: Callable[[EngineInfo], None]) -> None:
        """From the start of the engines to their end. `on_ready` is called with each model that is ready.

        Raises ServerError when none of them can be served.
        """
        self._warn_if_open()
        tasks = [
            asyncio.create_task(self._start_service(on_ready)),
            asyncio.create_task(measure_lag(self.service.metrics.loop_lag.observe)),
            asyncio.create_task(return_freed_memory()),
        ]
        try:
            await self.serve(sockets=[self.listener])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self.service.stop()
            self.listener.close()  # a server that never listened still has the port
            if self._port_file is not None:
                self._port_file.close()
        if self.error is not None:
            raise ServerError(self.error)

    def _note_refused(self, client: str | None, error: APIError) -> None:
        note(RequestRecord.refused(client, error.status, error.code or error.type), self.service.metrics)

    def _warn_if_open(self) -> None:
        host = self.service.config.server.host
        if not self.service.keys and not is_loopback(host):
            logger.warning(
                "--host %s without --api-key or --api-keys-file: every client that reaches it may use this server", host
            )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._wait_to_listen()
        if self._is_stopping:
            return
        tls = self.config.ssl
        if tls is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            make = partial(self._make_protocol, self.config, self.server_state, self.lifespan.state)
            self.servers = [TlsListener(one, _BACKLOG, tls, make) for one in sockets or ()]  # type: ignore[misc]
        logger.info("listening on %s", self._url_of(self.listener.getsockname()[0]))
        self._tell_port()

    async def _wait_to_listen(self) -> None:
        """Until `before_listening` ends, or the server is to stop. Raises what `before_listening` raises."""
        if self._before_listening is None:
            return
        waiting = asyncio.ensure_future(self._before_listening())
        while not waiting.done() and not self._is_stopping:
            await asyncio.wait([waiting], timeout=_POLL_S)
        if waiting.done():
            waiting.result()
        else:
            waiting.cancel()
            await asyncio.wait([waiting])

    @property
    def _is_stopping(self) -> bool:
        return self.should_exit or self._drain is not None

    def _tell_port(self) -> None:
        if self._port_file is None:
            return
        try:
            self._port_file.write(self.listener.getsockname()[1])
        except OSError as error:
            self.error = _no_port_file(self.service.config.server.port_file, error)
            self.should_exit = True

    async def _start_service(self, on_ready: Callable[[EngineInfo], None]) -> None:
        try:
            await self.service.start(on_ready)
        except Exception as error:
            if self.service.draining:
                return
            if not isinstance(error, EngineError | ValueError):
                logger.exception("the start failed")
            self.error = str(error) or type(error).__name__
            self.should_exit = True
            return
        await collect_when_quiet(lambda: self.service.is_quiet)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGTERM: self.request_stop, signal.SIGINT: self.request_stop, signal.SIGHUP: self.reload}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def reload(self) -> None:
        """Reads the file of API keys again; one that cannot be used changes nothing."""
        try:
            self.service.keys.reload()
        except ValueError as error:
            logger.error("%s; the keys that were there stay", error)
        else:
            logger.info("the API keys were read again")

    def request_stop(self) -> None:
        if self._drain is None:
            self._drain = asyncio.create_task(self._drain_and_exit())
            drain_s = self.service.config.server.drain_s
            if drain_s and (awaited := self.service.served.running):
                within = f"up to {drain_s:g} s for {awaited} running requests"
                logger.warning("the server stops: it waits %s; a second ctrl-C or SIGTERM ends them at once", within)
        else:
            self.service.served.cancel_all()

    async def _drain_and_exit(self) -> None:
        if self._shares_port and self.started:
            await self._hand_over()
        await self.service.drain()
        self.should_exit = True
        if self.owns_process:
            _end_process_within(_END_S)

    async def _hand_over(self) -> None:
        """New connections go to the others from now on, and clients are told to open some. Then those that are idle are
        closed, and the rest after their answers."""
        self._is_leaving = True
        for server in self.servers:
            server.close()
        await asyncio.sleep(_HAND_OVER_S)
        for connection in list(self.server_state.connections):
            connection.shutdown()


def _end_process_within(seconds: float) -> None:
    """Ends the process even if a thread is stuck: Python would wait for all threads of pools."""

    def end() -> None:
        logger.warning("the server ends without waiting for what still runs")
        os._exit(0)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def serve(config: Config, on_ready: Callable[[str, EngineInfo], None], service: Service | None = None) -> None:
    """Serves until a signal; on_ready(url, engine) is called once. Raises ServerError in one line when it cannot.

    `service`: see Server.
    """
    server = Server(config, service)
    server.owns_process = True
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.run_service(lambda info: on_ready(server.url, info)))
