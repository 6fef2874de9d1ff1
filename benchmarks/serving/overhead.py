"""The cost of the server itself: real HTTP and a real engine process around a fake executor.

    python -m benchmarks.serving.overhead [--streams 256] [--tokens 512] [--stream-interval 1]

All streams are chat completions that start together. There are two settings: a step that takes no time, in which
waiting tokens leave together in one write, and a step of 10 ms, in which each token is a write of its own. The client
runs in this process and only counts until the end of each stream; the tokens are the server's own usage counts. Prints
tokens/s and events per token over all streams, and the CPU time per token (in microseconds) of the API process, the
engine process and the client.
"""

import argparse
import asyncio
import json
import re
import time
from dataclasses import dataclass

from benchmarks.serving.server import Server

USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
TAIL_BYTES = 4096  # enough to hold the usage chunk and [DONE]


@dataclass
class Stream(asyncio.Protocol):
    """One streaming request over a connection of its own."""

    request: bytes
    done: asyncio.Future[tuple[int, int]]  # completion tokens, events
    tail: bytes = b""
    events: int = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"\ndata: ")
        self.tail = data if len(data) >= TAIL_BYTES else (self.tail + data)[-TAIL_BYTES:]
        if b"data: [DONE]" in self.tail:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        found = USAGE.search(self.tail)
        if found and b"[DONE]" in self.tail:
            self.done.set_result((int(found.group(1)), self.events))
        else:
            self.done.set_exception(RuntimeError(f"stream ended early: {self.tail[-300:]!r}"))


def http_request(server: Server, tokens: int, **parameters: object) -> bytes:
    body = json.dumps(
        {
            "model": server.model(),
            "messages": [{"role": "user", "content": "Tell me something."}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **parameters,
        }
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {server.host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


async def run_streams(server: Server, streams: int, tokens: int, **parameters: object) -> tuple[int, int]:
    """Tokens and events of all streams together; `parameters` are added to each request."""
    loop = asyncio.get_running_loop()
    request = http_request(server, tokens, **parameters)
    pending = [loop.create_future() for _ in range(streams)]
    for done in pending:
        await loop.create_connection(lambda done=done: Stream(request, done), server.host, server.port)  # type: ignore[misc]
    counts = await asyncio.gather(*pending)
    return sum(tokens for tokens, _ in counts), sum(events for _, events in counts)


def measure(args: argparse.Namespace, step_s: float) -> None:
    options = ["--executor", "fake", "--fake-step-s", str(step_s), "--log-level", "warning"]
    options += ["--max-num-seqs", str(args.streams), "--stream-interval", str(args.stream_interval)]
    with Server(*options) as server:
        asyncio.run(run_streams(server, args.streams, 32))
        for _ in range(args.passes):
            cpu, client_cpu, wall = server.cpu_seconds(), time.process_time(), time.perf_counter()
            tokens, events = asyncio.run(run_streams(server, args.streams, args.tokens))
            wall, client_cpu = time.perf_counter() - wall, time.process_time() - client_cpu
            used = {name: seconds - cpu[name] for name, seconds in server.cpu_seconds().items()} | {
                "client": client_cpu
            }
            costs = ", ".join(f"{name} {1e6 * seconds / tokens:.1f}" for name, seconds in used.items())
            print(
                f"{args.streams} streams, step {1e3 * step_s:g} ms: {tokens / wall:,.0f} tokens/s, "
                f"{events / tokens:.2f} events a token; CPU us/token: {costs}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="streams at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per stream (default: %(default)s)")
    parser.add_argument(
        "--stream-interval", type=int, default=1, help="tokens per streamed event (default: %(default)s)"
    )
    parser.add_argument(
        "--passes", type=int, default=3, help="measured passes, after one to warm up (default: %(default)s)"
    )
    args = parser.parse_args()
    for step_s in (0.0, 0.01):
        measure(args, step_s)


if __name__ == "__main__":
    main()
