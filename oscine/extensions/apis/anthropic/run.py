"""An answer whose conversation is compacted first."""

from collections.abc import Awaitable, Callable

from oscine.api.common.asgi import Write
from oscine.api.common.errors import APIError, unavailable
from oscine.api.serving.call import Call
from oscine.api.serving.schemas import ChatCompletionRequest
from oscine.api.turns.conversation import chat_messages
from oscine.api.turns.generation import Generation
from oscine.api.turns.progress import Turn
from oscine.extensions.apis.anthropic.answer import MessageAnswer
from oscine.extensions.apis.anthropic.compaction import Wanted, compacted_by, continued
from oscine.extensions.apis.compaction.seal import Compacted, Seal
from oscine.extensions.apis.compaction.summary import Summary

Next = Callable[[Call[ChatCompletionRequest]], Awaitable[Turn]]  # the turn that answers a request


class CompactedRun:
    def __init__(
        self,
        call: Call[ChatCompletionRequest],
        answer: MessageAnswer,
        wanted: Wanted,
        seal: Seal,
        turn: Next,
        num_fixed: int,
    ) -> None:
        """`answer`: with the turn that writes a summary. `num_fixed`: messages at the begin that stay as they are."""
        self._call, self._answer, self._wanted, self._seal, self._turn = call, answer, wanted, seal, turn
        self._fixed, self._said = call.body.messages[:num_fixed], call.body.messages[num_fixed:]

    async def run(self, write: Write | None) -> None:
        """Raises APIError."""
        answer, summary = self._answer, Summary(self._answer.turn, self._answer.begin_compaction)
        generation = Generation(self._call, [summary])
        with generation.admit():
            await generation.run(write)
        compacted = self._compacted(summary)
        events = self._block(compacted)
        if write is not None:
            await write(events)
        answer.paused = self._wanted.alone
        if answer.paused:
            return
        call = self._call
        if compacted is not None:
            call = call.with_body(continued(call.body, self._fixed, compacted))
        answer.turn = await self._turn(call)
        generation = Generation(call, [answer])
        with generation.admit():
            await generation.run(write)

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
