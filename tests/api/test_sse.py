"""Event streams over ASGI by hand: keep-alive comments, lost clients, lazily started responses."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from oscine.api.common.connection import run_while_connected
from oscine.api.common.errors import APIError
from oscine.api.http.sse import EventStream
from tests.api.scripted_server import ScriptedServer


class Client:
    """The other end of one ASGI response."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.gone = asyncio.Event()
        self.received = asyncio.Condition()

    async def send(self, message: Message) -> None:
        async with self.received:
            self.messages.append(message)
            self.received.notify_all()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    async def wait_for(self, text: bytes, count: int = 1) -> None:
        async with self.received:
            await self.received.wait_for(lambda: self.body.count(text) >= count)


def test_an_idle_stream_gets_comments_until_it_ends() -> None:
    async def main() -> Client:
        client = Client()
        events = EventStream(client.send, comments=True)

        async def work() -> None:
            await events.write(b"data: 1\n\n")
            await client.wait_for(b": keep-alive\n\n", 3)
            await events.end(b"data: 2\n\n")

        assert await run_while_connected(client.receive, work(), on_idle=events.keep_alive, idle_s=0.001)
        return client

    client = asyncio.run(main())
    first, *_, last = client.body.split(b": keep-alive\n\n")
    assert first == b"data: 1\n\n"
    assert last == b"data: 2\n\n"
    assert client.messages[0]["status"] == 200
    assert [m["more_body"] for m in client.messages[1:]] == [True] * (len(client.messages) - 2) + [False]


def test_a_stream_that_waits_for_its_first_event_is_kept_alive_too() -> None:
    async def main() -> Client:
        client = Client()
        events = EventStream(client.send, comments=True)
        await run_while_connected(
            client.receive, client.wait_for(b": keep-alive\n\n"), on_idle=events.keep_alive, idle_s=0.001
        )
        return client

    assert asyncio.run(main()).messages[0]["type"] == "http.response.start"


def test_no_comment_between_events_that_come_in_time() -> None:
    async def main() -> Client:
        client = Client()
        events = EventStream(client.send, comments=True)
        await events.write(b"data: 1\n\n")
        await events.keep_alive(1000.0)
        return client

    assert asyncio.run(main()).body == b"data: 1\n\n"


def test_a_stream_without_comments_has_events_alone() -> None:
    async def main() -> Client:
        client = Client()
        events = EventStream(client.send, comments=False)
        for _ in range(3):
            await events.keep_alive(0.0)
        await events.write(b"data: 1\n\n")
        await events.keep_alive(0.0)
        return client

    assert asyncio.run(main()).body == b"data: 1\n\n"


@pytest.mark.long
@pytest.mark.parametrize("comments", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/responses", {"input": "hi", "background": True}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_setting_holds_for_every_stream(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], comments: bool
) -> None:
    """The engine continues after its request has been idle for a while."""
    idle = run_while_connected.__kwdefaults__ | {"idle_s": 0.001}
    monkeypatch.setattr(run_while_connected, "__kwdefaults__", idle)
    with ScriptedServer(model_folder, keep_alive_comments=comments) as server:
        says, real = server.says("yes", server.tokenizer.return_), server.engine._play
        later = lambda *news: asyncio.get_running_loop().call_later(0.05, real, *news)  # noqa: E731
        monkeypatch.setattr(server.engine, "_play", later)
        server.engine.script = says
        answer = server.post(path, body | {"model": server.service.names[0], "stream": True})
        assert (": keep-alive" in answer.text) == comments, answer.text


def test_work_ends_at_once_when_the_client_goes() -> None:
    async def main() -> bool:
        client = Client()
        cleaned_up = False

        async def work() -> None:
            nonlocal cleaned_up
            client.gone.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                cleaned_up = True

        assert not await run_while_connected(client.receive, work())
        return cleaned_up

    assert asyncio.run(main())


def test_what_the_work_raises_is_raised() -> None:
    async def main() -> None:
        async def work() -> None:
            raise APIError("no")

        await run_while_connected(Client().receive, work())

    with pytest.raises(APIError, match="no"):
        asyncio.run(main())
