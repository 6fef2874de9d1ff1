"""HTTP by hand over a socket, for requests that no well-behaved client sends."""

import json
import socket
from typing import Any

from tests.server import ServerProcess

TIMEOUT_S = 30.0


def chat_body(**parameters: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **parameters}


LONG_ANSWER = chat_body(max_tokens=20_000, ignore_eos=True)


class RawClient:
    """Context manager: one connection."""

    def __init__(self, server: ServerProcess, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(TIMEOUT_S)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect((server.host, server.port))

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def head(self, *headers: str, path: str = "/v1/chat/completions") -> None:
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers, "", ""]
        self.socket.sendall("\r\n".join(lines).encode())

    def post(self, body: dict[str, Any], *headers: str) -> None:
        data = json.dumps(body).encode()
        self.head(f"Content-Length: {len(data)}", *headers)
        self.socket.sendall(data)

    def chunk(self, data: bytes) -> None:
        self.socket.sendall(b"%x\r\n%s\r\n" % (len(data), data))

    def read_until(self, text: bytes) -> bytes:
        """Fails when the connection ends before `text`."""
        data = b""
        while text not in data:
            more = self.socket.recv(65536)
            assert more, f"the connection ended after {data[-500:]!r}"
            data += more
        return data

    def read_to_end(self) -> bytes:
        data = b""
        while more := self.socket.recv(65536):
            data += more
        return data

    def status(self) -> int:
        return int(self.read_until(b"\r\n\r\n").split()[1])
