"""An answer whose conversation is compacted first, or behind results of the tools that the server runs."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from msgspec.structs import replace

from oscine.api.common.asgi import Write
from oscine.api.common.errors import CONTEXT_OVERFLOW, APIError, unavailable
from oscine.api.serving.call import Call
from oscine.api.serving.schemas import ChatCompletionRequest
from oscine.api.turns.conversation import chat_messages
from oscine.api.turns.generation import Generation
from oscine.api.turns.progress import Turn
from oscine.extensions.apis.anthropic.answer import MessageAnswer
from oscine.extensions.apis.anthropic.compaction import Wanted, compacted_by, continued
from oscine.extensions.apis.compaction.seal import Compacted, Seal
from oscine.extensions.apis.compaction.summary import MAX_WITHIN, Summary

_Call = Call[ChatCompletionRequest]


@dataclass(frozen=True, slots=True)
class Turns:
    """How the turns of an answer begin that has a place. Both raise APIError."""

    answer: Callable[[_Call], Awaitable[Turn]]
    summary: Callable[[_Call, list[int]], Awaitable[Turn]]  # of a prompt with all that was said and done


class CompactedRun:
    def __init__(
        self,
        call: _Call,
        answer: MessageAnswer,
        wanted: Wanted,
        seal: Seal,
        turns: Turns,
        num_fixed: int,
        *,
        is_first: bool,
    ) -> None:
        """`answer`: with the turn that writes a summary if `is_first`, else with that of the answer.

        `num_fixed`: messages at the begin that stay as they are.
        """
        self._call, self._answer, self._wanted, self._seal, self._turns = call, answer, wanted, seal, turns
        self._is_first = is_first
        self._fixed, self._said = call.body.messages[:num_fixed], call.body.messages[num_fixed:]

    async def run(self, write: Write | None) -> None:
        """Raises APIError. All turns have the place of the first one, as requests that go on behind a tool's result
        have."""
        with Generation(self._call, [self._answer]).admit():
            await self._run(write)

    async def _run(self, write: Write | None) -> None:
        answer, call = self._answer, self._call
        if self._is_first:
            call = await self._compact(call, write) or call
            if answer.paused:
                return
            answer.go_on(await self._turns.answer(call))
        for left in reversed(range(MAX_WITHIN + 1)):
            turn = answer.turn
            turn.compact_at = self._wanted.threshold if left else None
            await Generation(call, [answer]).run(write)
            if turn.prompt_to_compact is None:
                return
            call = call.with_body(_behind(call.body, turn))
            try:
                summary = await self._turns.summary(call, turn.prompt_to_compact)
            except APIError as error:
                if error.code != CONTEXT_OVERFLOW:
                    raise
                turn.finish_reason = "length"
                return
            answer.go_on(summary)
            compacted = await self._compact(call, write)
            if compacted is None:  # the client sends what there is, to go on from it
                answer.paused = "pause_turn"
            if compacted is None or answer.paused:
                return
            call = compacted
            answer.go_on(await self._turns.answer(call))

    async def _compact(self, call: _Call, write: Write | None) -> _Call | None:
        """The turn of the answer writes a summary. Returns the request that goes on from it, if it wrote one."""
        answer, summary = self._answer, Summary(self._answer.turn, self._answer.begin_compaction)
        await Generation(call, [summary]).run(write)
        compacted = self._compacted(summary)
        events = self._block(compacted)
        if write is not None:
            await write(events)
        answer.paused = "compaction" if self._wanted.alone else None
        return None if compacted is None else call.with_body(continued(call.body, self._fixed, compacted))

    def _compacted(self, summary: Summary) -> Compacted | None:
        """None if the model wrote nothing; raises APIError where nothing else is asked for."""
        try:
            text = summary.text
        except APIError as error:
            if not self._wanted.signed:
                return None
            failed = unavailable(error.message, code="overloaded")
            failed.details = {"error_code": "compaction_unavailable"}
            raise failed from None
        most = self._call.model.info.max_model_len
        return compacted_by(text, chat_messages(self._said), self._call.body, most)

    def _block(self, compacted: Compacted | None) -> bytes:
        sealed = None if compacted is None else self._seal.close(compacted)
        fields = {"content": None if compacted is None else compacted.summary, "encrypted_content": sealed}
        return self._answer.compact(fields, sealed if self._wanted.signed else None)


def _behind(body: ChatCompletionRequest, turn: Turn) -> ChatCompletionRequest:
    """What is left of a request behind a turn that has called a tool, so that none is required any more."""
    most = body.max_tokens
    choice = body.tool_choice if body.tool_choice in (None, "none") else "auto"
    return replace(body, max_tokens=None if most is None else most - turn.num_tokens, tool_choice=choice)
