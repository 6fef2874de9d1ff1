"""A batch against a server: a bounded number of requests at once; answers are written in order of arrival."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any, TextIO

import httpx
import msgspec

from oscine.cli.error import CommandError
from oscine.cli.server_url import client_settings
from oscine.extensions.apis.batches.lines import BatchInput, BatchLine, BatchOutput
from oscine.extensions.apis.batches.retries import Retries

PATIENCE_S = 120.0  # that a server may keep refusing one request, or be out of reach
_JSON = {"Content-Type": "application/json"}


class BatchRun:
    """One run over the lines of a file. Raises CommandError when the server cannot be asked; the output stays valid."""

    def __init__(self, lines: BatchInput, output: BatchOutput, url: str, api_key: str | None, report: TextIO) -> None:
        self._lines, self._output, self._url, self._api_key = lines, output, url, api_key
        self._report_to = report
        self._started_s = time.perf_counter()
        self._failed_before = output.num_failed
        self._answered = self._skipped = self._tokens = 0

    async def run(self, concurrency: int) -> None:
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        async with httpx.AsyncClient(limits=limits, **client_settings(self._url, self._api_key)) as self._client:
            await self._check_server()
            reporting = asyncio.create_task(self._report())
            state = ""
            try:
                await self._work(concurrency)
                state = "done"
            finally:
                reporting.cancel()
                self._say(state, end="\n")

    async def _check_server(self) -> None:
        try:
            response = await self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise CommandError(f"no answer from {self._url}: {error}") from None
        if not response.is_success:
            raise CommandError(f"{self._url} answered {response.status_code} to /v1/models: {response.text[:200]}")

    async def _work(self, concurrency: int) -> None:
        todo = iter(self._lines)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._take_turns(todo))
        except* CommandError as errors:
            raise errors.exceptions[0] from None

    async def _take_turns(self, todo: Iterator[BatchLine]) -> None:
        for line in todo:
            if self._output.has(line):
                self._skipped += 1
            elif line.problem:
                self._output.refuse(line, "invalid_line", line.problem)
            else:
                await self._answer(line)
                continue
            await asyncio.sleep(0)  # lets other tasks run: the next million lines may be such lines too

    async def _answer(self, line: BatchLine) -> None:
        response = await self._ask(line)
        body = _json(response)
        self._output.answer(
            line, response.status_code, response.headers.get("x-request-id", ""), msgspec.json.encode(body)
        )
        self._answered += response.is_success
        self._tokens += _tokens(body)

    async def _ask(self, line: BatchLine) -> httpx.Response:
        """Repeats the request until the server takes it: the server may be full, or restarting."""
        give_up_s = time.monotonic() + PATIENCE_S
        retries = Retries()
        while True:
            try:
                response = await self._client.post(line.url, content=line.body, headers=_JSON)
            except httpx.TransportError as error:
                why, delay_s = str(error) or type(error).__name__, retries.next_delay_s()
            else:
                again_s = retries.delay_s(response.status_code, response.content, response.headers.get("retry-after"))
                if again_s is None:
                    return response
                why, delay_s = f"it answers {response.status_code}: {response.text[:200]}", again_s
            if time.monotonic() + delay_s > give_up_s:
                raise CommandError(f"{self._url} takes no requests ({why}); run the command again to go on")
            await asyncio.sleep(delay_s)

    async def _report(self) -> None:
        is_terminal = self._report_to.isatty()
        while True:
            await asyncio.sleep(0.5 if is_terminal else 10.0)
            self._say(end="" if is_terminal else "\n")

    def _say(self, state: str = "", *, end: str) -> None:
        """On a terminal each report replaces the one before it."""
        elapsed_s = time.perf_counter() - self._started_s
        parts = [f"{self._answered:,} answered", f"{self._output.num_failed - self._failed_before:,} failed"]
        parts += [f"{self._skipped:,} done before"] if self._skipped else []
        parts += [f"{self._tokens:,} tokens", f"{self._tokens / elapsed_s:,.0f} tokens/s", f"{elapsed_s:,.0f} s"]
        start = "\r\x1b[K" if self._report_to.isatty() else ""
        print(f"{start}{state or f'{self._lines.share_read:.0%}'}: {', '.join(parts)}", end=end, file=self._report_to)
        self._report_to.flush()


def _json(response: httpx.Response) -> Any:
    """The body; as a text if a proxy answered something other than JSON."""
    try:
        return msgspec.json.decode(response.content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return response.text


def _tokens(body: Any) -> int:
    """Generated tokens, by the usage of the answer."""
    usage = body.get("usage") if isinstance(body, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    count = usage.get("completion_tokens", usage.get("output_tokens"))
    return count if isinstance(count, int) else 0
