"""One turn of the model: the engine's tokens become events, through calls of built-in tools and a forced answer.

Each API has an encoder of its own for the events. What they look like on the wire is not known here.
"""

import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from oscine.api.common.record import SequenceTimes
from oscine.api.serving.served_model import ReadyModel
from oscine.chat.events import (
    BuiltinCallBegin,
    BuiltinCallDelta,
    Event,
    MessageEnd,
    ReasoningDelta,
    ToolCallBegin,
)
from oscine.chat.messages import BuiltinCall
from oscine.chat.toolbox import Toolbox, ToolResult
from oscine.types import GenerationOutput, GenerationRequest, TokenLogprobs

_NEVER = sys.maxsize
Remember = Callable[[Sequence[str], str], None]  # ids of calls, and the reasoning that led to them


class Parser(Protocol):
    """Makes events of tokens. See HarmonyParser."""

    separator: str  # between the texts of several messages, as events have it

    @property
    def num_tokens(self) -> int:
        """Fed, up to and with the one that ended the turn."""
        ...

    @property
    def num_reasoning_tokens(self) -> int: ...

    @property
    def num_tool_calls(self) -> int: ...

    @property
    def done(self) -> bool: ...

    @property
    def stop_string(self) -> str | None: ...

    @property
    def thinking(self) -> bool: ...

    def feed(self, token_ids: Iterable[int]) -> list[Event]: ...

    def finish(self) -> list[Event]: ...

    def resume(self, prompt: Sequence[int]) -> list[Event]: ...


@dataclass(slots=True)
class ToolBegins:
    """The call of a built-in tool is complete, and the tool runs."""


@dataclass(slots=True)
class ToolAnswered:
    call: BuiltinCall
    result: ToolResult


TurnEvent = Event | ToolBegins | ToolAnswered


@dataclass(frozen=True, slots=True)
class ContinuationPolicy:
    """How a turn goes on after its first request to the engine."""

    headroom: int = 0  # tokens of the budget that are reserved for the answer; 0: no answer is forced
    final: str | None = None  # grammar of what the final message says
    later: str | None = None  # grammar of all that follows a tool's result


PLAIN = ContinuationPolicy()


class _Calls:
    """The calls of a turn, and the reasoning that led to them, as its events report them."""

    def __init__(self, separator: str, remember: Remember | None) -> None:
        self._between, self._remember = "" if separator else "\n\n", remember
        self.builtin: BuiltinCallBegin | None = None  # complete at an interruption
        self._builtin_text: list[str] = []
        self._ids: list[str] = []
        self._thoughts: list[str] = []

    def note(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case ReasoningDelta():
                    self._thoughts.append(event.text)
                case MessageEnd(kind="reasoning"):
                    self._thoughts.append(self._between)
                case ToolCallBegin():
                    self._ids.append(event.id)
                case BuiltinCallBegin():
                    self.builtin, self._builtin_text = event, []
                    self._thoughts = []  # they led to this call
                case BuiltinCallDelta():
                    self._builtin_text.append(event.content)

    def take_builtin(self) -> BuiltinCall | None:
        begin, self.builtin = self.builtin, None
        return None if begin is None else BuiltinCall(begin.recipient, "".join(self._builtin_text), begin.channel)

    def remember(self) -> None:
        """The turn is complete."""
        if self._remember is not None and self._ids:
            self._remember(self._ids, "".join(self._thoughts).removesuffix(self._between))


class Turn:
    """Grows with the engine's outputs. A turn may take several requests to the engine: `request` is the newest one."""

    def __init__(
        self,
        model: ReadyModel,
        request: GenerationRequest,
        parser: Parser,
        course: ContinuationPolicy = PLAIN,
        *,
        toolbox: Toolbox | None = None,
        ignore_eos: bool = False,
        remember: Remember | None = None,
    ) -> None:
        """The request's max_tokens are the budget of the turn. `remember` gets the reasoning that led to calls."""
        self.request = request
        self.generated: list[int] = []  # up to and with the token that ended the turn
        self.logprobs: list[TokenLogprobs] = []  # aligned with `generated`
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_appended_tokens = 0  # to the prompt, by later requests: results of tools, and headers
        self.num_cached_tokens = 0
        self.finish_reason: Literal["stop", "length", "tool_calls"] | None = None  # set when the turn is complete
        self.times: SequenceTimes | None = None  # set when the sequence begins to run
        self.interrupted = False  # whether the engine's request is to end now, for `go_on`
        self.compact_at: int | None = None  # the turn ends when a tool's result makes the prompt this long
        self.prompt_to_compact: list[int] | None = None  # with which it has ended so
        self._model, self._parser, self._course, self._toolbox = model, parser, course, toolbox
        self.may_call = remember is not None  # whether the client's functions may be called
        self._ignore_eos = ignore_eos
        self._budget = request.sampling.max_tokens
        self._begin = 0  # index in `generated` of the request's first token
        self._headroom = course.headroom
        self._force_at = self._budget - course.headroom if course.headroom else _NEVER  # index in `generated`
        self._calls = _Calls(parser.separator, remember)
        self._notes_calls = toolbox is not None or remember is not None

    @property
    def num_tokens(self) -> int:
        return len(self.generated)

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parser.num_reasoning_tokens

    @property
    def has_called(self) -> bool:
        return self._parser.num_tool_calls > 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the content."""
        return self._parser.stop_string

    def feed(self, output: GenerationOutput) -> list[Event]:
        """The news in order; tokens that do not show yet give none."""
        if not self._begin:
            self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        room = self._force_at - len(self.generated)
        if len(output.token_ids) < room:
            return self._take(output)
        self._force_at, self._headroom = _NEVER, 0
        before, after = _cut(output, max(room, 0))
        events = self._take(before)
        if self._goes_on and self._parser.thinking and not self._parser.done:
            prompt = self._model.prompts.into_final(self._all_tokens)
            events += self._continue(prompt, self._course.final) or []  # none: the context has no room for an answer
        return events + self._take(after) if self._goes_on else events

    @property
    def _goes_on(self) -> bool:
        return self.finish_reason is None and not self.interrupted

    def _take(self, output: GenerationOutput) -> list[Event]:
        self.generated += output.token_ids
        if output.logprobs is not None:
            self.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        events = self._parser.feed(output.token_ids)
        ends = output.finish_reason is not None or self._is_over
        rest = self._parser.finish() if ends else []
        events += rest
        if self._notes_calls:
            self._calls.note(events)
        if ends:
            self._end(rest, is_cut=output.finish_reason == "length" and not self._is_over)
        return events

    @property
    def _is_over(self) -> bool:
        """Whether the turn has ended before the engine knows: by a stop string, or as the model speaks for others."""
        parser = self._parser
        return parser.done and (not self._ignore_eos or parser.stop_string is not None)

    def _end(self, rest: list[Event], *, is_cut: bool) -> None:
        """The engine's request is over, or of no more use. `rest` are the last events."""
        if self._is_over:
            del self.generated[self._parser.num_tokens :], self.logprobs[self._parser.num_tokens :]
        if is_cut:
            for event in rest:
                if type(event) is MessageEnd:
                    event.cut = True
            self._finish("length")
        elif self._calls.builtin is not None:
            self.interrupted = True
        else:
            self._finish("tool_calls" if self._parser.num_tool_calls else "stop")

    def _finish(self, reason: Literal["stop", "length", "tool_calls"]) -> None:
        self.finish_reason = reason
        self._calls.remember()

    def stop(self) -> bool:
        """Ends the turn after the last event, before its own end. Returns whether it would have gone on."""
        if self.finish_reason is not None or self._parser.num_tool_calls:
            return False
        self.interrupted = False
        self._finish("stop")
        return True

    @property
    def _all_tokens(self) -> list[int]:
        return [*self.request.prompt_token_ids, *self.generated[self._begin :]]

    def _continue(self, prompt: list[int], grammar: str | None) -> list[Event] | None:
        """Turns to a request with this prompt. Returns what was still open; None if there is no room for a token."""
        left = min(self._budget - len(self.generated), self._model.info.max_model_len - len(prompt))
        if left < 1:
            return None
        self.num_appended_tokens += max(len(prompt) - len(self._all_tokens), 0)  # an incomplete header is dropped
        self._begin = len(self.generated)
        if self._headroom:
            self._force_at = self._begin + left - self._headroom
        sampling = replace(self.request.sampling, max_tokens=left, min_tokens=0, grammar=grammar)
        request_id = uuid.uuid4().hex
        self.request = replace(self.request, request_id=request_id, prompt_token_ids=prompt, sampling=sampling)
        self.interrupted = True
        return self._parser.resume(prompt)

    async def go_on(self) -> AsyncIterator[list[TurnEvent]]:
        """Called at an interruption, once the engine's request has ended. Runs the tool that was called, if any.

        Afterwards the turn is complete, or `request` is the one that goes on.
        """
        call = self._calls.take_builtin()
        if call is not None:
            yield [ToolBegins()]
            assert self._toolbox is not None
            result = await self._toolbox.call(call.recipient, call.content)
            yield [ToolAnswered(call, result), *await self._after(call, result)]
        self.interrupted = False

    async def _after(self, call: BuiltinCall, result: ToolResult) -> list[Event]:
        """Goes on with a tool's result in the prompt, unless the turn ends here."""
        if self._parser.num_tool_calls:  # the client is to answer those first
            self._finish("tool_calls")
            return []
        prompts, grammar = self._model.prompts, self._course.later
        prompt = await prompts.after_call(self._all_tokens, call, result.text)
        assert self._toolbox is not None
        if result.details is None and self._toolbox.exhausted:  # it does not take no for an answer
            prompt, grammar = prompts.into_final(prompt), self._course.final
        elif self.compact_at is not None and len(prompt) >= self.compact_at and len(self.generated) < self._budget:
            self.prompt_to_compact = prompt
            self._finish("stop")
            return []
        events = self._continue(prompt, grammar)
        if events is None:
            self._finish("length")
        return events or []


def usual_headroom(setting: int, max_tokens: int) -> int:
    """The final headroom of a request that sets none: the server's setting, but at most half of the token budget."""
    return min(setting, max_tokens // 2)


def _cut(output: GenerationOutput, count: int) -> tuple[GenerationOutput, GenerationOutput]:
    """The first `count` tokens of some news, and the rest with how it ended."""
    ids, logprobs = output.token_ids, output.logprobs
    before = replace(
        output, token_ids=ids[:count], logprobs=logprobs and logprobs[:count], finish_reason=None, error=None
    )
    return before, replace(output, token_ids=ids[count:], logprobs=logprobs and logprobs[count:])
