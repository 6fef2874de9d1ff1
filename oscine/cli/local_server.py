"""A server for one command, in a thread of this process; its engine is a child process."""

import asyncio
import logging
import signal
import threading
from types import TracebackType

from oscine.api.server import Server, ServerError
from oscine.cli.error import CommandError
from oscine.config import Config
from oscine.types import EngineInfo


class LocalServer:
    """Context manager that gives the server's URL once it is ready. Raises CommandError if it cannot start.

    Its port should be 0: any that is free.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._changed = threading.Event()  # ready, or failed
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="server")

    def __enter__(self) -> str:
        logging.basicConfig(level=logging.WARNING)
        self._server = Server(self._config)
        self._thread.start()
        try:
            self._changed.wait()
        except KeyboardInterrupt:
            self._stop()
            raise
        if self._error is not None:
            self._thread.join()
            raise CommandError(self._error)
        return self._server.url

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._server.request_stop)
        self._thread.join()

    def _run(self) -> None:
        # Ctrl-C must reach the main thread: delivered here, it would not wake the prompt.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            asyncio.run(self._serve())
        except ServerError as error:
            self._error = str(error)
        finally:
            self._changed.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.run_service(self._on_ready)

    def _on_ready(self, info: EngineInfo) -> None:
        self._changed.set()
