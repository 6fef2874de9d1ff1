"""The cost of `oscine bench serve` itself, before a source that streams prepared bytes.

    python -m benchmarks.serving.client [--streams 256] [--tokens 1000] [--tokens-per-write 1]

A server whose every token costs CPU time would be the limit, so the source only writes: to each of its streams in turn,
one prepared event or several of them. Prints tokens/s of one client process and its CPU time per token.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from oscine.checkpoint.hub import NANO_FOLDER

_CHUNK = {
    "id": "chatcmpl-9945d80880dc45e598e5a8cdb3818fed",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
}
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_ROOM = 65_536  # bytes that may wait for a client that is slow


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(**fields: object) -> bytes:
    return _chunk(b"data: %s\n\n" % json.dumps({**_CHUNK, **fields}, separators=(",", ":")).encode())


def _delta(**delta: str) -> bytes:
    return _event(choices=[{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}], usage=None)


class Source:
    """Every POST is answered with a stream of `tokens` tokens."""

    def __init__(self, tokens: int, tokens_per_write: int) -> None:
        self.num_writes = tokens // tokens_per_write
        usage = {"prompt_tokens": 10, "completion_tokens": self.num_writes * tokens_per_write}
        self.begin = _HEAD + _delta(role="assistant", content="")
        self.piece = _delta(content=" something") * tokens_per_write
        self.end = _event(choices=[], usage=usage) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self.left: dict[asyncio.Transport, int] = {}  # writes of each stream under way

    async def serve(self) -> None:
        """Prints the port."""
        server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        while True:
            for transport, left in list(self.left.items()):
                if transport.get_write_buffer_size() > _ROOM:
                    continue
                transport.write(self.piece if left else self.end)
                self.left[transport] = left - 1
                if not left:
                    del self.left[transport]
            await asyncio.sleep(0 if self.left else 0.01)


class _Connection(asyncio.Protocol):
    def __init__(self, source: Source) -> None:
        self._source = source

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Requests are short enough to come in one piece."""
        if data.startswith(b"POST"):
            self._transport.write(self._source.begin)
            self._source.left[self._transport] = self._source.num_writes
        else:
            body = b'{"data": [{"id": "m"}]}' if b"/models" in data else b""
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    def connection_lost(self, error: Exception | None) -> None:
        self._source.left.pop(self._transport, None)


def measure(args: argparse.Namespace) -> None:
    source = [sys.executable, "-m", "benchmarks.serving.client", "--serve", "--tokens", f"{args.tokens}"]
    source += ["--tokens-per-write", f"{args.tokens_per_write}"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(source, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        start_s = _cpu_s(url, folder, 1, 1)[1]  # of the command itself
        row, cpu_s = _cpu_s(url, folder, args.streams, args.rounds * args.streams)
        process.terminate()
    us = 1e6 * (cpu_s - start_s) / row["total_output_tokens"]
    print(
        f"{args.streams} streams, {args.tokens_per_write} tokens per write: "
        f"{row['output_tput_per_gpu']:,.0f} tokens/s; "
        f"{us:.1f} us of CPU per token, which is {1e6 / us:,.0f} tokens/s per core"
    )


def _cpu_s(url: str, folder: str, concurrency: int, sessions: int) -> tuple[dict[str, float], float]:
    """The row of a run, and the CPU time of its processes."""
    output = Path(folder) / f"{concurrency}.jsonl"
    load = ["--concurrency", f"{concurrency}", "--sessions", f"{sessions}", "--isl", "10", "--warm-up", "0"]
    more = ["--tokenizer", str(NANO_FOLDER), "--output", str(output)]
    before = os.times()
    subprocess.run([sys.executable, "-m", "oscine", "bench", "serve", url, *load, *more], check=True, stdout=sys.stderr)
    after = os.times()
    cpu_s = after.children_user - before.children_user + after.children_system - before.children_system
    return json.loads(output.read_text()), cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="streams at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="streams after each other (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens per stream (default: %(default)s)")
    parser.add_argument("--tokens-per-write", type=int, default=1, help="events per write (default: %(default)s)")
    parser.add_argument("--serve", action="store_true", help="be the source")
    args = parser.parse_args()
    if not args.serve:
        measure(args)
        return
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Source(args.tokens, args.tokens_per_write).serve())


if __name__ == "__main__":
    main()
