"""A run: all tasks to one server, a bounded number of requests at once. Each answer is graded and written at once."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from tqdm import tqdm

from oscine.cli.server_url import client_settings
from oscine.extensions.apis.batches.retries import Retries
from oscine.extensions.eval.grade import answer_of
from oscine.extensions.eval.results import ResultsFile, Row, Run
from oscine.extensions.eval.task import Task

PATIENCE_S = 120.0  # that a server may keep refusing a request, or be out of reach, before the request has failed


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    api_key: str | None
    timeout_s: float


class EvalRun:
    """The answers of one server to `samples` requests per task."""

    def __init__(self, server: Server, run: Run, output: ResultsFile | None) -> None:
        self._server, self._run, self._output = server, run, output
        self._patience_s, self._answered_s = PATIENCE_S, 0.0  # when the server last answered

    async def answers(self, tasks: Sequence[Task], samples: int, concurrency: int) -> list[Row]:
        """A row per task and sample, in this order; one of an earlier run where the output has it."""
        kept = {} if self._output is None else self._output.kept
        wanted = [(task, sample) for task in tasks for sample in range(samples)]
        found = {key: row for task, sample in wanted if (row := kept.get(key := (task.id, sample))) is not None}
        todo = iter([(task, sample) for task, sample in wanted if (task.id, sample) not in found])
        settings = client_settings(self._server.url, self._server.api_key)
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        with tqdm(total=len(wanted), initial=len(found), unit=" answers", disable=None, leave=False) as bar:
            async with httpx.AsyncClient(limits=limits, **settings) as self._client, asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(wanted))):
                    group.create_task(self._take_turns(todo, found, bar))
        return [found[task.id, sample] for task, sample in wanted]

    async def _take_turns(
        self, todo: Iterator[tuple[Task, int]], found: dict[tuple[str, int], Row], bar: "tqdm[Any]"
    ) -> None:
        for task, sample in todo:
            row = await self._answer(task, sample)
            found[row.key] = row
            if self._output is not None:
                self._output.append(row)
            bar.update()

    async def _answer(self, task: Task, sample: int) -> Row:
        body = self._run.parameters | task.body | {"model": self._run.model}
        if "seed" in self._run.parameters:
            body["seed"] = self._run.parameters["seed"] + sample
        try:
            response = await self._ask(body)
            answer, tokens = answer_of(response)
        except (_FailedError, ValueError) as error:
            return Row.failed(task, sample, " ".join(str(error).split())[:500])
        return Row.of(task, sample, answer, tokens)

    async def _ask(self, body: dict[str, Any]) -> Any:
        """Asks again while the server is full or out of reach. If it answers no request meanwhile, the next ones
        ask only once, until there is an answer."""
        began_s = time.monotonic()
        give_up_s = began_s + self._patience_s
        retries = Retries()
        while True:
            try:
                async with asyncio.timeout(self._server.timeout_s):
                    response = await self._client.post("/v1/chat/completions", json=body)
            except TimeoutError:
                raise _FailedError(f"no answer within {self._server.timeout_s:g} s") from None
            except httpx.HTTPError as error:
                why, delay_s = str(error) or type(error).__name__, retries.next_delay_s()
            else:
                again_s = retries.delay_s(response.status_code, response.content, response.headers.get("retry-after"))
                if again_s is None:
                    self._patience_s, self._answered_s = PATIENCE_S, time.monotonic()
                    return _body(response)
                why, delay_s = f"{response.status_code}: {_reason(response)}", again_s
            if time.monotonic() + delay_s > give_up_s:
                if self._answered_s < began_s:
                    self._patience_s = 0.0
                raise _FailedError(why)
            await asyncio.sleep(delay_s)


class _FailedError(Exception):
    """A request without an answer; the message says why."""


def _body(response: httpx.Response) -> Any:
    if not response.is_success:
        raise _FailedError(f"{response.status_code}: {_reason(response)}")
    return response.json()


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
