"""One response from its plan to its end, for a client that waits or in the background."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import msgspec
from msgspec.structs import replace

from oscine.api.common.asgi import Write
from oscine.api.common.errors import CONTEXT_OVERFLOW, APIError, internal, unavailable
from oscine.api.serving.logprobs import ContentLogprobs
from oscine.api.serving.service import Service
from oscine.api.turns.generation import Generation
from oscine.api.turns.progress import Turn, TurnEvent
from oscine.chat.toolbox import McpListing
from oscine.extensions.apis.compaction.seal import Compacted, Seal
from oscine.extensions.apis.compaction.summary import MAX_WITHIN, Summary, kept
from oscine.extensions.apis.responses import resource
from oscine.extensions.apis.responses.background import KeptResponses
from oscine.extensions.apis.responses.events import ResponseEvents
from oscine.extensions.apis.responses.items import CompactionItem, OutputItems, Status, required_input
from oscine.extensions.apis.responses.plan import ResponsePlan
from oscine.extensions.apis.responses.resource import TERMINAL, KeptItem, KeptResponse, new_response, with_output
from oscine.extensions.apis.responses.schemas import ResponseAnswer, ResponseStatus
from oscine.extensions.apis.responses.store import Memory, StoredResponse
from oscine.extensions.apis.responses.view import Object

logger = logging.getLogger(__name__)

WITHIN = "oscine.within"  # in an ASGI scope
_CONTINUED = ("completed", "incomplete")  # statuses of responses that become a part of their conversation


class Within:
    """What a request has with the connection that it came over, beside others."""

    def __init__(self, memory: Memory, *, generate: bool = True) -> None:
        """`generate`: whether there is an answer; else the prompt is only computed, for the next response."""
        self.memory, self.generate = memory, generate
        self.response_id: str | None = None  # from its begin on
        self.steered = False  # whether the response ends after its next item, for others to follow
        self.may_be_steered = False
        self.required_input: list[Object] = []  # what the client is to send next, without results

    def begin(self, plan: ResponsePlan) -> None:
        body = plan.body
        self.response_id = plan.id
        self.may_be_steered = body.conversation_id is None and not body.context_management and not plan.trigger

    def end(self, output: Sequence[Object], stored: StoredResponse | None) -> None:
        """`stored`: of a response that is not in the store."""
        self.required_input = [stub for item in output if (stub := required_input(item)) is not None]
        if stored is not None:
            self.memory.keep(stored)


class Output(Protocol):
    """The items of a response, as one of its turns makes them."""

    calls: dict[str, list[str]]

    @property
    def turn(self) -> Turn: ...

    @property
    def ended(self) -> list[Object]: ...

    def begin(self, listings: Sequence[McpListing]) -> None: ...

    def encode(self, events: Sequence[TurnEvent]) -> bytes: ...

    def end(self, status: Status) -> None: ...


class Compaction:
    """The compaction of the conversation, as the next item. One that does not become complete is in no output."""

    def __init__(self, turn: Turn, events: ResponseEvents, before: Output | None = None) -> None:
        """`before`: has the items that are complete."""
        self._before: list[Object] = [] if before is None else [*before.ended]
        self._summary = Summary(turn, self._tell)
        self._events = events
        self._item: CompactionItem | None = None
        self._is_complete = False
        self.calls: dict[str, list[str]] = {} if before is None else before.calls

    @property
    def turn(self) -> Turn:
        return self._summary.turn

    @property
    def ended(self) -> list[Object]:
        own = [self._item.item] if self._item is not None and self._is_complete else []
        return [*self._before, *own]

    def begin(self, listings: Sequence[McpListing]) -> None:
        """The tools of MCP servers are listed with the answer."""
        self._item = CompactionItem(self._events, len(self._before))

    def encode(self, events: Sequence[TurnEvent]) -> bytes:
        return self._summary.encode(events)

    def _tell(self) -> bytes:
        assert self._item is not None
        self._item.grow()
        return self._events.take()

    def end(self, status: Status) -> None:
        """Nothing to end."""

    def complete(self, plan: ResponsePlan, seal: Seal) -> ResponsePlan:
        """Ends the item. Returns the plan that goes on from the summary. Raises APIError for an empty summary."""
        assert self._item is not None
        summary = self._summary.text
        said = [(str(of.role), of.content) for of in kept(plan.said, plan.call.model.info.max_model_len)]
        self._item.complete(seal.close(Compacted(summary, said)))
        self._is_complete = True
        return plan.compacted(summary)


class Prepared:
    """A turn whose prompt is computed, for the next one to begin sooner; what it says is dropped."""

    def __init__(self, turn: Turn, before: Sequence[Object] = ()) -> None:
        """`before`: items that are complete."""
        sampling = dataclasses.replace(turn.request.sampling, max_tokens=1, min_tokens=0)
        turn.request = dataclasses.replace(turn.request, sampling=sampling)
        self.turn = turn
        self.ended: list[Object] = [*before]
        self.calls: dict[str, list[str]] = {}

    def begin(self, listings: Sequence[McpListing]) -> None:
        """They are listed with the answer."""

    def encode(self, events: Sequence[TurnEvent]) -> bytes:
        return b""

    def end(self, status: Status) -> None:
        self.turn.generated.clear()


class ResponseRun:
    """Makes one response. `begun` is set when it has begun. Before that, `run` raises errors."""

    def __init__(self, service: Service, kept: KeptResponses, plan: ResponsePlan, within: Within | None = None) -> None:
        body = plan.body
        self._within = within
        self._service, self._kept, self._plan = service, kept, plan
        self._output: Output | None = None
        self._turns: list[Turn] = []
        self._place = ExitStack()  # of the sequence, from its first turn to its last one
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
        if self._within is not None and self.response.status in _CONTINUED:
            assert self._output is not None
            self._within.end(self._output.ended, None if self.response.store else self._stored())
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
            with self._place:  # left before the tools are closed
                await self._make(plan, write)

    async def _make(self, plan: ResponsePlan, write: Write | None) -> None:
        if await plan.is_to_compact(self._service):
            plan = await self._compact(plan, await plan.summary(self._service), write)
        if plan.trigger:
            self._end("completed")
            return
        if self._within is not None and not self._within.generate:
            before = () if self._output is None else self._output.ended
            await self._run(plan, Prepared(await plan.turn(self._service), before), write)
            self._end("completed")
            return
        await self._answer(plan, write)

    async def _answer(self, plan: ResponsePlan, write: Write | None) -> None:
        """In several turns, if results of tools make the conversation so long that it is compacted."""
        for left in reversed(range(MAX_WITHIN + 1)):
            turn = await plan.turn(self._service)
            turn.compact_at = plan.threshold if left else None
            output = self._items_of(plan, turn)
            await self._run(plan, output, write)
            if turn.prompt_to_compact is None:
                break
            plan = plan.behind(turn)
            try:
                summary = await plan.summary_within(self._service, turn.prompt_to_compact)
            except APIError as error:
                if error.code != CONTEXT_OVERFLOW:
                    raise
                self._end("incomplete")
                return
            plan = await self._compact(plan, summary, write)
        cut, steered = turn.finish_reason == "length", output.was_steered
        self._end("incomplete" if cut or steered else "completed", reason="steered" if steered else None)

    def _items_of(self, plan: ResponsePlan, turn: Turn) -> OutputItems:
        """The items of the response, which the turn goes on with."""
        logprobs = ContentLogprobs(plan.call.model.tokenizer, plan.top_logprobs, turn.logprobs)
        summaries, before = plan.body.summary is not None, () if self._output is None else self._output.ended
        output = OutputItems(turn, self.events, plan.tools, plan.toolbox, logprobs, before, summaries=summaries)
        if self._output is not None:
            output.calls = self._output.calls
        if (within := self._within) is not None:
            output.is_steered = lambda: within.steered
        return output

    async def _compact(self, plan: ResponsePlan, summary: Turn, write: Write | None) -> ResponsePlan:
        """Adds the item of a compaction. Returns the plan that goes on from the summary."""
        compaction = Compaction(summary, self.events, self._output)
        await self._run(plan, compaction, write)
        return compaction.complete(plan, self._kept.store.seal)

    async def _run(self, plan: ResponsePlan, output: Output, write: Write | None) -> None:
        """The next turn of the response. The first one begins it, and is admitted: the others have its place, as
        requests that go on behind a tool's result have."""
        generation = Generation(plan.call, [output], "responses")
        is_first = self._output is None
        if is_first:
            self._place.enter_context(generation.admit())
        self._output = output
        self._turns.append(output.turn)
        if is_first:
            await self._begin(write)
        output.begin(self._listings(plan))
        if is_first:
            self.begun.set()
            if self._plan.body.background:
                await self.events.flush(write)
        await generation.run(write)

    def _listings(self, plan: ResponsePlan) -> list[McpListing]:
        """The tools of MCP servers that the conversation has not seen listed."""
        return [of for of in plan.toolbox.listings if of.server_label not in plan.listed]

    async def _begin(self, write: Write | None) -> None:
        if self._within is not None:
            self._within.begin(self._plan)
        self.events.add("response.created", response=self.snapshot())
        if self._plan.body.background:
            self.events.add("response.queued", response=self.snapshot())
            await self._store()
        self.response.status = "in_progress"
        self.events.add("response.in_progress", response=self.snapshot())

    def _end(self, status: ResponseStatus, error: APIError | None = None, reason: str | None = None) -> None:
        """`reason`: why it is incomplete, if not by its number of tokens."""
        assert self._output is not None
        of_items: Status = "completed" if status == "completed" else "incomplete"
        self._output.end(of_items)
        self.response.status = status
        self.response.usage = resource.usage(self._turns)
        if status == "completed":
            self.response.completed_at = int(time.time())
        if status == "incomplete":
            self.response.incomplete_details = {"reason": reason or "max_output_tokens"}
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

    def _stored(self) -> StoredResponse:
        plan, output = self._plan, self._output
        assert output is not None
        running, calls = not self.ended, output.calls
        state = {} if running else plan.toolbox.state()
        kept = KeptResponse(replace(self.response, output=output.ended), calls, state)
        return StoredResponse(
            plan.id,
            plan.owner,
            plan.body.previous_response_id,
            self.response.created_at,
            running,
            msgspec.json.encode(kept),
            msgspec.json.encode(plan.input),
            None if running else self.events.all(),
        )

    async def _store(self) -> None:
        try:
            await self._kept.store.put(self._stored(), self._items())
        except Exception:
            self._service.metrics.store_failures.inc()
            logger.exception("a response could not be stored")
            raise
