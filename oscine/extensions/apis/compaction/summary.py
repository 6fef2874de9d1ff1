"""Summaries that replace a conversation. The model writes them, because no rule can tell what matters of its work."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from oscine.api.common.errors import APIError
from oscine.api.serving import sampling
from oscine.api.serving.call import Call
from oscine.api.serving.formats import Calls
from oscine.api.serving.parameters import SamplingFields
from oscine.api.serving.service import Service
from oscine.api.turns.begin import Prepared, begin_turns
from oscine.api.turns.progress import Turn, TurnEvent
from oscine.chat.events import ContentDelta
from oscine.chat.messages import Conversation, Message
from oscine.chat.toolbox import bounded

MAX_TOKENS = 4096  # per summary, with the reasoning before it
MAX_WITHIN = 16  # compactions behind results of tools, within one answer
INTRODUCTION = "What was said and done before is no longer shown. This is your summary of it; go on from there.\n\n"
ASK = (
    "Write a summary of this conversation for yourself. From now on you see it in place of all that you said and did, "
    "and of what tools answered. Say what was asked and decided, what has been done and found out, with the names, "
    "paths and figures that are needed again, and what is to be done next. Do not answer the conversation, and call "
    "no tools."
)
_FIXED = ("system", "developer")  # roles of instructions
_SAMPLING = ("model", "temperature", "top_p", "top_k", "min_p", "seed", "priority", "cache_salt")


class Summary:
    """The turn that writes a summary: a Choice of oscine.api.turns.generation."""

    def __init__(self, turn: Turn, on_news: Callable[[], bytes] = bytes) -> None:
        """`on_news` returns what the client is sent while the summary is written."""
        self.turn = turn
        self._on_news = on_news
        self._texts: list[str] = []

    def encode(self, events: Sequence[TurnEvent]) -> bytes:
        self._texts += (event.text for event in events if isinstance(event, ContentDelta))
        return self._on_news()

    @property
    def text(self) -> str:
        """Raises APIError for a summary without a word."""
        text = "".join(self._texts)
        if not text.strip():
            raise APIError("The model wrote no summary.", status=500, type="server_error", code="compaction_failed")
        return text


async def summary_turn(service: Service, call: Call[Any], talk: Conversation, param: str, ask: str = ASK) -> Turn:
    """The turn that summarises a conversation. The prompt is that of the conversation, with one message more, so its
    pages are cached. `param`: the parameter with the conversation.

    Raises APIError for a conversation that leaves no room in the context.
    """
    asked = replace(talk, messages=(*talk.messages, Message("user", ask)), response_schema=None)
    size = call.size + sum(len(message.content) + len(message.reasoning or "") for message in asked.messages)
    return await _turn(service, call, lambda: call.model.prompts.render(asked, size, param), param)


async def summary_within(service: Service, call: Call[Any], prompt: Sequence[int], param: str, ask: str = ASK) -> Turn:
    """The same for an answer that has been begun. `prompt`: with all that was said and done in it."""
    return await _turn(service, call, lambda: call.model.prompts.after_user(prompt, ask), param)


async def _turn(service: Service, call: Call[Any], make_prompt: Callable[[], Awaitable[list[int]]], param: str) -> Turn:
    given = {name: value for name in _SAMPLING if (value := getattr(call.body, name, None)) is not None}
    plain, model = call.with_body(SamplingFields(**given)), call.model

    async def prepare() -> Prepared:
        prompt = await make_prompt()
        room = max(1, min(MAX_TOKENS, model.info.max_model_len - len(prompt)))
        stops = model.tokenizer.turn_end_ids
        params = sampling.read(plain.body, model.info, stops, len(prompt), room, prompt=param, param="max_tokens")
        return prompt, params, room // 2

    (turn,) = await begin_turns(service, plain, None, Calls(choice="none"), prepare)
    return turn


def kept(said: Sequence[Message], max_model_len: int) -> list[Message]:
    """All system and developer messages, and the newest user messages. Those of the user have together at most half
    as many bytes as the context has tokens. Earlier summaries are not among them."""
    found, left = [], max_model_len // 2
    for message in reversed(said):
        if message.role in _FIXED:
            found += [replace(message, tools=())] if message.content else []
        elif message.role == "user" and left > 0 and not message.content.startswith(INTRODUCTION):
            size = len(message.content.encode("utf-8", "surrogatepass"))
            found.append(message if size <= left else replace(message, content=bounded(message.content, left // 4)))
            left -= size
    return found[::-1]


def replacement(said: Sequence[Message], summary: str, max_model_len: int) -> tuple[Message, ...]:
    """The messages that stand for those that were said, and declare the tools that were found in them."""
    tools = tuple(tool for message in said for tool in message.tools)
    found = [Message("developer", tools=tools)] if tools else []
    return (*kept(said, max_model_len), *found, summarised(summary))


def summarised(summary: str) -> Message:
    return Message("user", INTRODUCTION + summary)
