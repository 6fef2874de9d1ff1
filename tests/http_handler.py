"""Servers of a few lines, in a thread of the test: what they answer is a handler."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """A subclass has `get` or `post`. Logs nothing."""

    def get(self) -> None:
        """Answers GET, and HEAD."""
        self.send_error(501)

    def post(self, body: bytes) -> None:
        """Answers POST."""
        self.send_error(501)

    def do_HEAD(self) -> None:
        self.get()

    def do_GET(self) -> None:
        self.get()

    def do_POST(self) -> None:
        self.post(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, status: int, body: str, **headers: str) -> None:
        """`headers`: with _ for -. HEAD gets the length of the body alone."""
        data = body.encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args: object) -> None: ...


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    """Its URL."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()


@contextmanager
def serving(handler: type[Handler]) -> Iterator[str]:
    """The URL of a server on a free port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, running(server) as url:
        yield url
