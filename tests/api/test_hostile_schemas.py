"""Schemas that take hours to compile block neither other requests nor the shutdown of the server."""

from pathlib import Path
from typing import Any

from tests.api.raw_client import RawClient, chat_body
from tests.hostile_schemas import quartic_schema
from tests.server import ServerProcess
from tests.waiting import wait_until

MORE_THAN_THREADS = 12
IN_PROGRESS = "oscine:http_requests_in_progress"
ORDINARY = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def body(schema: dict[str, Any]) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return chat_body(response_format=form, max_tokens=5)


def test_endless_schemas_end_with_their_clients_or_with_an_error(model_folder: Path) -> None:
    with ServerProcess(str(model_folder), "--executor", "fake", "--log-level", "error") as server:
        alone = server.metric(IN_PROGRESS)  # counts the request that asks for it
        clients = [RawClient(server) for _ in range(MORE_THAN_THREADS)]
        for client in clients:
            client.post(body(quartic_schema(600)))
        wait_until(lambda: server.metric(IN_PROGRESS) == alone + MORE_THAN_THREADS, "their arrival")
        for client in clients:
            client.socket.close()
        wait_until(lambda: server.metric(IN_PROGRESS) == alone, "the end of what they asked for")
        assert server.post("/v1/chat/completions", body(ORDINARY))["choices"]
        with RawClient(server) as staying:
            staying.post(body(quartic_schema(600)))
            answer = staying.read_until(b"compile")
            assert answer.split()[1] == b"400"
        with RawClient(server) as last:
            last.post(body(quartic_schema(600)))
            wait_until(lambda: server.metric(IN_PROGRESS) == alone + 1, "its arrival")
            server.terminate()
            assert server.exit_code() == 0
