"""The engine's end of the wire, played by a test: records requests, and sends answers word for word."""

import asyncio

import zmq
import zmq.asyncio

from oscine.engine.wire.messages import Cancel, Hello, Outputs, Submit, ToClient, ToEngine, decode_to_engine, encode
from oscine.extensions.replicas.spec.placement import Place
from oscine.types import GenerationOutput, GenerationRequest, PrefillSource


class RawEngine:
    """Context manager. One client at a time."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._client = b""

    def __enter__(self) -> "RawEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def place(self, prefill: PrefillSource | None = None) -> Place:
        return Place(self.replica, self.address, prefill, num_overlap_tokens=0, queue_s=0.0)

    async def receive(self) -> ToEngine:
        async with asyncio.timeout(10.0):
            self._client, data = await self._socket.recv_multipart()
        return decode_to_engine(data)

    async def request(self) -> GenerationRequest:
        """The next one; what a client says before does not count."""
        while True:
            message = await self.receive()
            if isinstance(message, Submit):
                return message.request
            assert isinstance(message, Hello | Cancel)

    async def send(self, message: ToClient) -> None:
        await self._socket.send_multipart((self._client, encode(message)))

    async def answer(self, request: GenerationRequest, token_ids: list[int], **news: object) -> None:
        output = GenerationOutput(request.request_id, token_ids, **news)  # type: ignore[arg-type]
        await self.send(Outputs([output], None))

    def end(self) -> None:
        """As kill -9 ends one."""
        self._context.destroy(0)
