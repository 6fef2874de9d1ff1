"""A server for one command, in a thread of this process; its engine is a child process."""

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

from oscine.api.server import Server, ServerError
from oscine.cli.error import ended_by
from oscine.settings.config import Config


@contextmanager
def local_server(config: Config) -> Iterator[str]:
    """Gives the server's URL once it is ready. Its port should be 0: any that is free. Raises CommandError."""
    logging.basicConfig(level=logging.WARNING)
    with ended_by(ServerError):
        server = Server(config)
    loop, ready = asyncio.new_event_loop(), Future[None]()

    def run() -> None:
        # Ctrl-C must reach the main thread: delivered here, it would not wake the prompt.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(server.run_service(lambda info: ready.set_result(None)))
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
            elif not isinstance(error, ServerError):
                raise
        finally:
            if not ready.done():
                ready.set_exception(ServerError("the server has ended"))

    thread = threading.Thread(target=run, name="server")
    thread.start()
    try:
        with ended_by(ServerError):
            ready.result()
        yield server.url
    finally:
        with suppress(RuntimeError):  # the server has ended by itself
            loop.call_soon_threadsafe(server.request_stop)
        thread.join()
