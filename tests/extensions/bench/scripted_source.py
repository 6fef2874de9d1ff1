"""A server that streams what a test scripts, for the client that measures: an oracle of what was sent and asked."""

import json
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Body = dict[str, Any]
Piece = bytes | float  # a chunk of the body, or seconds to wait before the next one
DONE = b"data: [DONE]\n\n"
_CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}


def chat_event(**delta: str) -> bytes:
    chunk = {**_CHUNK, "choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None}
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode()


def usage_event(prompt: int, output: int, cached: int = 0) -> bytes:
    details = {"cached_tokens": cached}
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
    return f"data: {json.dumps({**_CHUNK, 'choices': [], 'usage': usage})}\n\n".encode()


def chat_stream(num_tokens: int, *, first_s: float = 0.0, next_s: float = 0.0) -> list[Piece]:
    """As a reasoning model says it: the role, half of the tokens as reasoning, the others as the answer, the usage."""
    pieces: list[Piece] = [chat_event(role="assistant", content="")]
    for index in range(num_tokens):
        pieces.append(next_s if index else first_s)
        pieces.append(chat_event(reasoning="so ") if index < num_tokens // 2 else chat_event(content="yes "))
    return [*pieces, chat_event(), usage_event(7, num_tokens, cached=3), DONE]


class ScriptedSource:
    """Context manager. `reply` makes a status and the pieces of an answer from the body of a request."""

    def __init__(
        self, reply: Callable[[Body], tuple[int, Iterable[Piece]]], *, api_key: str = "", hangs_up: bool = False
    ) -> None:
        """`hangs_up`: connections are closed after each answer, without a word."""
        self.asked: list[Body] = []  # in the order of arrival
        self.energy_j = 0.0  # each answer adds 10
        self.at_once = self.most_at_once = self.num_connections = 0
        self._lock = threading.Lock()
        source = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                source.num_connections += 1

            def do_GET(self) -> None:
                if api_key and self.headers["Authorization"] != f"Bearer {api_key}":
                    return self._whole(401, b'{"error": {"message": "no such key"}}')
                if self.path == "/metrics":
                    return self._whole(200, f'oscine_energy_joules_total{{gpu="0"}} {source.energy_j}\n'.encode())
                return self._whole(200, b'{"data": [{"id": "scripted"}]}')

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with source._lock:
                    source.asked.append(body)
                    source.at_once += 1
                    source.most_at_once = max(source.most_at_once, source.at_once)
                    status, pieces = reply(body)
                source.energy_j += 10
                if status != 200:
                    return self._whole(status, b"".join(piece for piece in pieces if isinstance(piece, bytes)))
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream; charset=utf-8")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                due_s = time.monotonic()
                for piece in pieces:
                    if isinstance(piece, float):
                        due_s += piece
                        time.sleep(max(0.0, due_s - time.monotonic()))
                    else:
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                with source._lock:
                    source.at_once -= 1
                self.wfile.write(b"0\r\n\r\n")
                self.close_connection = hangs_up
                return None

            def _whole(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 64
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """Clients may leave."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "ScriptedSource":
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
