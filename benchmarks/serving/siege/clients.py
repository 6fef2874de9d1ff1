"""Clients of a server under siege: single raw requests, many at a time, JSON requests, uploads."""

import asyncio
import contextlib
import http.client
import json
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.serving.promises import Broken, require
from benchmarks.serving.server import Server
from benchmarks.serving.siege.requests import Attack

_STATUS = re.compile(rb"(?:\A|\r\n\r\n)HTTP/1\.1 ([0-9]{3}) ")
CLIENTS = 32  # hostile ones at a time
ATTACK_S = 60.0  # longer than any answer takes
MODEL = "m"
HEALTHY, HOSTILE, GREEDY = (f"Authorization: Bearer {name}-key".encode() for name in ("healthy", "hostile", "greedy"))


async def make(server: Server, attack: Attack) -> int | None:
    """The status of the first response, if there was any; 0 for a connection that the server closed without one."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        for piece in attack.pieces:
            writer.write(piece)
            await writer.drain()
            if attack.pause_s:
                await asyncio.sleep(attack.pause_s)
        if attack.leaves:
            return None
        if attack.half_closes:
            writer.write_eof()
        answer = await reader.read(1 << 16)
        while more := await reader.read(1 << 16):
            answer = (answer + more)[: 1 << 16]
        statuses = [int(status) for status in _STATUS.findall(answer)]
        return next((status for status in statuses if status >= 200), 0)  # not of interim responses
    except OSError:  # closed before all was sent
        return None
    finally:
        writer.close()


async def make_in_time(server: Server, attack: Attack) -> int | None:
    """Raises Broken for an answer with status 500, or for none in time."""
    try:
        async with asyncio.timeout(ATTACK_S):
            status = await make(server, attack)
    except TimeoutError:
        raise Broken(f"no answer to {attack.name}") from None
    require(status != 500, f"500 for {attack.name}: {attack.pieces[0][:2000]!r}")
    return status


async def make_all(server: Server, made: Iterable[Attack], clients: int = CLIENTS) -> Counter[str]:
    """The number of answers per status."""
    statuses: Counter[str] = Counter()
    queue = iter(made)

    async def client() -> None:
        for attack in queue:
            statuses[str(await make_in_time(server, attack))] += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return statuses


def shown(statuses: Counter[str]) -> str:
    return ", ".join(f"{status}: {number}" for status, number in sorted(statuses.items()))


def ask(
    server: Server, key: bytes, path: str, body: Any = None, method: str | None = None
) -> tuple[int, dict[str, Any]]:
    """Status and answer."""
    headers = {"Authorization": key.decode().partition(": ")[2], "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=ATTACK_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def upload(server: Server, key: bytes, content: Sequence[bytes]) -> tuple[int, dict[str, Any]]:
    """A file for batches, in pieces. Status and answer; status 0 if the server closes the connection."""
    edge = b"--x\r\nContent-Disposition: form-data; name="
    parts = [
        edge + b'"purpose"\r\n\r\nbatch\r\n' + edge + b'"file"; filename="f.jsonl"\r\n\r\n',
        *content,
        b"\r\n--x--\r\n",
    ]
    connection = http.client.HTTPConnection(server.host, server.port, timeout=ATTACK_S)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/v1/files")
        connection.putheader("Authorization", key.decode().partition(": ")[2])
        connection.putheader("Content-Type", "multipart/form-data; boundary=x")
        connection.putheader("Content-Length", str(sum(map(len, parts))))
        connection.endheaders()
        try:
            for part in parts:
                connection.send(part)
        except OSError:  # refused before its end
            pass
        try:
            response = connection.getresponse()
            return response.status, json.load(response)
        except (OSError, http.client.HTTPException):
            return 0, {}
