"""One response from its plan to its end, for a client that waits or in the background."""

import asyncio
import logging
import time

import msgspec
from msgspec.structs import replace

from oscine.api.common.asgi import Write
from oscine.api.common.errors import APIError, internal, unavailable
from oscine.api.serving.logprobs import ContentLogprobs
from oscine.api.serving.service import Service
from oscine.api.turns.generation import Generation
from oscine.extensions.apis.responses import resource
from oscine.extensions.apis.responses.background import KeptResponses
from oscine.extensions.apis.responses.events import ResponseEvents
from oscine.extensions.apis.responses.items import OutputItems, Status
from oscine.extensions.apis.responses.plan import ResponsePlan
from oscine.extensions.apis.responses.resource import TERMINAL, KeptItem, KeptResponse, new_response, with_output
from oscine.extensions.apis.responses.schemas import ResponseAnswer, ResponseStatus
from oscine.extensions.apis.responses.store import StoredResponse

logger = logging.getLogger(__name__)

_CONTINUED = ("completed", "incomplete")  # statuses of responses that become a part of their conversation


class ResponseRun:
    """Makes one response. `begun` is set when it has begun. Before that, `run` raises errors."""

    def __init__(self, service: Service, kept: KeptResponses, plan: ResponsePlan) -> None:
        body = plan.body
        self._service, self._kept, self._plan = service, kept, plan
        self._output: OutputItems | None = None
        self.response = new_response(plan.id, body, plan.call.name, plan.toolbox.names)
        self.events = ResponseEvents(plan.include, wanted=bool(body.stream), kept=bool(body.background))
        self.begun = asyncio.Event()
        self.cancelling = False  # whether it is to end as cancelled when its task is
        self.unstored = False  # it has ended and could not be stored

    async def run(self, write: Write | None) -> None:
        """Runs to the last event. That is written once storing has succeeded or failed, and says if it failed.

        Raises APIError if the response cannot begin, and CancelledError. Then nothing is stored, unless the response
        runs in the background.
        """
        try:
            await self._generate(write)
        except asyncio.CancelledError:
            if not (self._plan.body.background and self.begun.is_set()):
                raise
            if self.cancelling:
                self._end("cancelled")
            else:
                self._end("failed", unavailable("The server shut down while this response was being made."))
        except Exception as error:
            if not self._may_fail():
                raise
            if not isinstance(error, APIError):
                logger.exception("a response failed")
                error = internal()
            self._end("failed", error)
        if self._plan.body.conversation_id is not None and self.response.status in _CONTINUED:
            await self._continue(self._plan.body.conversation_id)
        if not self._plan.body.background and self.response.store:
            self.response.store = await self.store()
        self.events.add(f"response.{TERMINAL[self.response.status]}", response=self.snapshot())
        if self._plan.body.background:  # with all its events, including the last one
            await self.store()
        await self.events.flush(write)

    @property
    def id(self) -> str:
        return self._plan.id

    @property
    def owner(self) -> str:
        return self._plan.owner

    @property
    def ended(self) -> bool:
        return self.response.status in TERMINAL

    def _may_fail(self) -> bool:
        """Whether a failure is part of the response: a client that has got nothing yet gets a plain error instead."""
        streamed = bool(self._plan.body.stream) and self.events.num_taken > 0
        return self.begun.is_set() and (streamed or bool(self._plan.body.background))

    async def _generate(self, write: Write | None) -> None:
        plan = self._plan
        async with plan.toolbox:
            turn = await plan.turn(self._service)
            logprobs = ContentLogprobs(plan.call.model.tokenizer, plan.top_logprobs, turn.logprobs)
            summaries = plan.body.summary is not None
            output = OutputItems(turn, self.events, plan.tools, plan.toolbox, logprobs, summaries=summaries)
            generation = Generation(plan.call, [output], "responses")
            with generation.admit():
                await self._begin(output, write)
                await generation.run(write)
            self._end("incomplete" if turn.finish_reason == "length" else "completed")

    async def _begin(self, output: OutputItems, write: Write | None) -> None:
        self._output = output
        self.events.add("response.created", response=self.snapshot())
        if self._plan.body.background:
            self.events.add("response.queued", response=self.snapshot())
            await self._store()
        self.response.status = "in_progress"
        self.events.add("response.in_progress", response=self.snapshot())
        for listing in self._plan.toolbox.listings:
            if listing.server_label not in self._plan.listed:
                output.list_tools(listing)
        self.begun.set()
        if self._plan.body.background:
            await self.events.flush(write)

    def _end(self, status: ResponseStatus, error: APIError | None = None) -> None:
        assert self._output is not None
        of_items: Status = "completed" if status == "completed" else "incomplete"
        self._output.end(of_items)
        self.response.status = status
        self.response.usage = resource.usage(self._output.turn)
        if status == "completed":
            self.response.completed_at = int(time.time())
        if status == "incomplete":
            self.response.incomplete_details = {"reason": "max_output_tokens"}
        if error is not None:
            self.response.error = resource.failure(error)

    def last_event(self) -> bytes:
        """Nothing: `run` sends it."""
        return b""

    def failure(self, error: APIError) -> bytes:
        """What a stream ends with that fails before the response has begun."""
        failed = ResponseEvents()
        failed.add("error", code=error.code, message=error.message, param=error.param)
        return failed.take()

    def refusal(self, error: APIError) -> bytes:
        """The whole stream of a response that is refused, for clients that read errors in events only."""
        self.events.add("response.created", response=self.snapshot())
        self.response.status, self.response.error = "failed", resource.failure(error)
        self.events.add("response.failed", response=self.snapshot())
        return self.events.take()

    def body(self) -> bytes:
        return msgspec.json.encode(self.snapshot())

    def snapshot(self) -> ResponseAnswer:
        """The response as it stands, with the items that are complete."""
        items = [] if self._output is None else self._output.ended
        return with_output(self.response, items, self._plan.include)

    async def store(self) -> bool:
        """Stores the ended response. Returns whether that succeeded; a failure does not withhold the answer."""
        try:
            await self._store()
        except Exception:
            self.unstored = True
        else:
            self.unstored = False
        return not self.unstored

    def _items(self) -> list[tuple[str, bytes]]:
        """The items of its input and output, as they are stored."""
        output = self._output
        assert output is not None
        kept = [KeptItem(item, output.calls.get(item["id"])) for item in (*self._plan.input, *output.ended)]
        return [(of.item["id"], msgspec.json.encode(of)) for of in kept]

    async def _continue(self, conversation_id: str) -> None:
        """Adds its items to the conversation. Where that fails, the response names no conversation."""
        items, state, owner = self._items(), msgspec.json.encode(self._plan.toolbox.state()), self.owner
        try:
            done = await self._kept.store.write_conversation(
                lambda tables, db: tables.append(db, conversation_id, owner, items, state)
            )
        except Exception:
            done = False
            self._service.metrics.store_failures.inc()
            logger.exception("a conversation could not be continued")
        if not done:
            self.response.conversation = None

    async def _store(self) -> None:
        plan, output = self._plan, self._output
        assert output is not None
        running, calls = not self.ended, output.calls
        state = {} if running else plan.toolbox.state()
        kept = KeptResponse(replace(self.response, output=output.ended), calls, state)
        stored = StoredResponse(
            plan.id,
            plan.owner,
            plan.body.previous_response_id,
            self.response.created_at,
            running,
            msgspec.json.encode(kept),
            msgspec.json.encode(plan.input),
            None if running else self.events.all(),
        )
        try:
            await self._kept.store.put(stored, self._items())
        except Exception:
            self._service.metrics.store_failures.inc()
            logger.exception("a response could not be stored")
            raise
