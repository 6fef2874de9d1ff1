"""A hub on this machine that speaks the part of the Hugging Face hub's API that its client uses to download models."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from typing import Any

from tests.http_handler import Handler, running

COMMIT = "0123456789012345678901234567890123456789"
TOKEN = "hf_secret"  # opens gated repositories
LARGE = 1 << 20  # files of at least this many bytes are named by their hash


class LocalHub(ThreadingHTTPServer):
    """Repositories by name, each with files by name. Connections for large files may break or stall."""

    daemon_threads = True

    def __init__(self, host: str) -> None:
        super().__init__((host, 0), _Handler)
        self.host = host
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.knows_ranges = True
        self.breaks_after: int | None = None  # bytes of a large file per connection
        self.damages = False  # large files
        self.stalls_after: int | None = None  # the same; the connection stays open
        self.trickle_s: float | None = None  # seconds per byte of a stalled file, so that no client gives it up
        self.stalled = threading.Event()
        self.asked: list[tuple[str, str, str]] = []  # method, file or address, range
        self.clients: dict[str, list[str]] = {}  # addresses that sent a GET, by file

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.server_port}"

    def end_stalls(self) -> None:
        self.stalls_after = None
        self.stalled.set()

    def ranges(self, file: str) -> list[str]:
        """The ranges that were requested of a file, in order."""
        return [asked for method, name, asked in self.asked if method == "GET" and name == file]

    def resumed_at(self, file: str) -> int:
        """The byte at which the second of two requests for a file began; the first one was for all of it."""
        found = self.ranges(file)
        assert len(found) == 2, found
        assert found[0] == ""
        return int(found[1].removeprefix("bytes=").removesuffix("-"))


@contextmanager
def local_hub(host: str = "127.0.0.1") -> Iterator[LocalHub]:
    """`host`: an address of this machine."""
    with LocalHub(host) as server, running(server):
        yield server


class _Handler(Handler):
    server: LocalHub
    protocol_version = "HTTP/1.1"

    def get(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        if path.startswith("api/models/"):
            owner, name, *more = path.removeprefix("api/models/").split("/")
            self._describe(f"{owner}/{name}", "tree" in more)
        elif "/resolve/" in path:
            repository, _, rest = path.partition("/resolve/")
            self._file(repository, rest.partition("/")[2])
        else:
            self._send(200, b"")

    def _describe(self, name: str, tree: bool) -> None:
        files = self.server.repositories.get(name)
        if files is None:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        entries = [_entry(file, content, tree) for file, content in files.items()]
        answer = entries if tree else {"id": name, "sha": COMMIT, "siblings": entries, "tags": []}
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, repository: str, name: str) -> None:
        asked = self.headers.get("Range", "")
        self.server.asked.append((self.command, name, asked))
        if self.command == "GET":
            self.server.clients.setdefault(name, []).append(self.client_address[0])
        if repository in self.server.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            return
        content = self.server.repositories.get(repository, {}).get(name)
        if content is None:
            self._send(
                404,
                b"",
                {"X-Error-Code": "EntryNotFound" if repository in self.server.repositories else "RepoNotFound"},
            )
            return
        headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked and self.server.knows_ranges else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if self.server.damages and len(content) >= LARGE:
            content = bytes(len(content))
        self._send(206 if start else 200, content[start:], headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        hub = self.server
        limit = hub.breaks_after if hub.stalls_after is None else hub.stalls_after
        if limit is None or len(body) <= limit:
            self.wfile.write(body)
            return
        self.wfile.write(body[:limit])
        self.wfile.flush()
        if hub.stalls_after is not None:
            self._stall(body[limit:])
        self.close_connection = True

    def _stall(self, rest: bytes) -> None:
        """Until the hub ends stalls, or the client is gone."""
        with suppress(OSError):
            for i in range(len(rest)):
                if self.server.stalled.wait(self.server.trickle_s):
                    break
                self.wfile.write(rest[i : i + 1])
                self.wfile.flush()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if len(content) >= LARGE else hashlib.sha1(content).hexdigest()


def _entry(name: str, content: bytes, tree: bool) -> dict[str, Any]:
    """A file as the hub describes it, in the tree of a revision or among the files of a model."""
    entry: dict[str, Any] = {"type": "file", "path": name} if tree else {"rfilename": name}
    entry |= {"size": len(content), "oid": _digest(content), "blobId": _digest(content)}
    if len(content) >= LARGE:
        named = {"oid": _digest(content)} if tree else {"sha256": _digest(content)}
        entry["lfs"] = {"size": len(content), "pointerSize": 130, **named}
    return entry
