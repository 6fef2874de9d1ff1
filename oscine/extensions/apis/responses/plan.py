"""From a request for a response to all that it takes to make it: its conversation, tools, grammar and sampling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from oscine.api.common.errors import CONTEXT_OVERFLOW, APIError, invalid, not_found, unsupported
from oscine.api.common.keys import Caller
from oscine.api.common.work import run_in_thread
from oscine.api.serving import sampling
from oscine.api.serving.call import Call
from oscine.api.serving.formats import Calls, Form, check_beside_calls, check_name, extensions, only_form
from oscine.api.serving.reasoning_memory import ReasoningMemory
from oscine.api.serving.service import Service
from oscine.api.turns.begin import Prepared, begin_turns
from oscine.api.turns.conversation import leave_out
from oscine.api.turns.instructions import folders_last
from oscine.api.turns.progress import Turn, usual_headroom
from oscine.chat.effort import Effort, model_effort
from oscine.chat.grammar import JsonFormat
from oscine.chat.messages import Conversation, Message, ResponseSchema
from oscine.chat.toolbox import Toolbox
from oscine.extensions.apis.compaction.summary import replacement, summary_turn, summary_within
from oscine.extensions.apis.responses.input import (
    ItemHistory,
    configured,
    input_items,
    new_tools,
    references,
    refuse_duplicates,
    without_trigger,
)
from oscine.extensions.apis.responses.items import new_id
from oscine.extensions.apis.responses.resource import TERMINAL, KeptItem, KeptResponse
from oscine.extensions.apis.responses.schemas import ResponseRequest
from oscine.extensions.apis.responses.store import Memory, ResponseStore, StoredResponse
from oscine.extensions.apis.responses.tools import ClientTools, allowed, builtin_tools, left_out
from oscine.extensions.apis.responses.view import LOGPROBS, Object, included

_FULL = 0.75  # of the context: a prompt that is compacted if the request names no threshold
_MAX_REFERENCES = 8192  # to stored items; each is looked up by itself
_MAX_CHAIN_BYTES = 32 << 20  # of the stored responses that one response continues


@dataclass(frozen=True)
class ResponsePlan:
    """A request that is in order. Its toolbox is to be entered before its engine request is made."""

    id: str
    owner: str  # name of the API key
    call: Call[ResponseRequest]
    include: frozenset[str]
    input: list[Object]
    messages: tuple[Message, ...]
    tools: ClientTools
    toolbox: Toolbox
    listed: frozenset[str]  # MCP servers whose tools the conversation has seen listed
    trigger: bool = False  # whether the conversation is compacted, and nothing else is answered
    has_called: bool = False  # whether a tool was called in the answer, so that none is required any more

    @property
    def body(self) -> ResponseRequest:
        return self.call.body

    @property
    def top_logprobs(self) -> int | None:
        top = self.body.top_logprobs
        return top or 0 if top or LOGPROBS in self.include else None

    @property
    def _allowed(self) -> Calls:
        body = self.body
        parallel = body.parallel_tool_calls is not False
        calls = allowed(body.tool_choice, self.tools, self.toolbox.recipients, parallel=parallel)
        return replace(calls, choice="auto") if self.has_called and calls.choice == "required" else calls

    async def prompt(self, date: str, memory: ReasoningMemory) -> list[int]:
        """Raises APIError."""
        return await self.call.model.prompts.render(self._conversation(date, memory), self._size, "input")

    async def num_prompt_tokens(self, date: str, memory: ReasoningMemory) -> int:
        """Also of a prompt that the context does not hold. Raises APIError."""
        return await self.call.model.prompts.count(self._conversation(date, memory), self._size, "input")

    def _conversation(self, date: str, memory: ReasoningMemory) -> Conversation:
        body, hidden = self.body, self._allowed.choice == "none"
        declared = () if hidden else self.tools.declared
        said = tuple(replace(said, tools=()) for said in self.messages) if hidden else self.messages
        talk = Conversation(
            messages=folders_last(said) if declared else said,
            tools=declared,
            response_schema=_text_format(body)[1],
            reasoning_effort=model_effort(body.reasoning.effort if body.reasoning else None),
            current_date=date,
            namespaces=() if hidden else self.toolbox.namespaces,
        )
        return memory.restore(self.owner, talk)

    async def turn(self, service: Service) -> Turn:
        """Raises APIError."""
        body = self.body
        call, may = self.call, self._allowed
        wanted = await run_in_thread(partial(_form, call.body), call.size, call.caller.threads)
        if not may.recipients:  # else an answer may follow them
            check_beside_calls(extensions(body), may.choice)

        async def prepare() -> Prepared:
            try:
                prompt = await self.prompt(service.date, service.reasoning)
                model = self.call.model
                params = sampling.read(
                    body,
                    model.info,
                    model.tokenizer.turn_end_ids,
                    len(prompt),
                    body.max_output_tokens,
                    prompt="input",
                    param="max_output_tokens",
                    logprobs=self.top_logprobs,
                )
            except APIError as error:
                if error.code == CONTEXT_OVERFLOW and body.truncation == "auto":
                    error.message += " Dropping items ('truncation': 'auto') is not supported."
                raise
            return prompt, params, usual_headroom(service.config.server.final_headroom, params.max_tokens)

        (turn,) = await begin_turns(service, self.call, wanted, may, prepare, toolbox=self.toolbox)
        return turn

    async def is_to_compact(self, service: Service) -> bool:
        """Whether the conversation is compacted before the answer. Raises APIError."""
        threshold = self.threshold
        if self.trigger or threshold is None:
            return self.trigger
        return await self.num_prompt_tokens(service.date, service.reasoning) >= threshold

    @property
    def threshold(self) -> int | None:
        """The tokens of a prompt that is compacted."""
        usual = int(_FULL * self.call.model.info.max_model_len)
        return min((of.compact_threshold or usual for of in self.body.context_management or ()), default=None)

    async def summary(self, service: Service, effort: Effort | None = None) -> Turn:
        """The turn that writes a summary. `effort`: of its reasoning, if not that of the request. Raises APIError."""
        talk = self._conversation(service.date, service.reasoning)
        if effort is not None:
            talk = replace(talk, reasoning_effort=model_effort(effort))
        return await summary_turn(service, self.call, talk, "input")

    async def summary_within(self, service: Service, prompt: Sequence[int]) -> Turn:
        """The same for an answer that has been begun. `prompt`: with all that was said and done. Raises APIError."""
        return await summary_within(service, self.call, prompt, "input")

    def behind(self, turn: Turn) -> "ResponsePlan":
        """What is left of the answer behind a turn that has called a tool."""
        most = self.body.max_output_tokens
        body = msgspec.structs.replace(self.body, max_output_tokens=None if most is None else most - turn.num_tokens)
        listed = self.listed.union(of.server_label for of in self.toolbox.listings)
        return replace(self, call=self.call.with_body(body), listed=listed, has_called=True)

    def compacted(self, summary: str) -> "ResponsePlan":
        """The same with the summary in place of the conversation."""
        messages = replacement(self.said, summary, self.call.model.info.max_model_len)
        return replace(self, messages=(*self._instructions, *messages))

    @property
    def said(self) -> tuple[Message, ...]:
        """The conversation without the request's instructions."""
        return self.messages[len(self._instructions) :]

    @property
    def _instructions(self) -> tuple[Message, ...]:
        return self.messages[:1] if self.body.instructions else ()

    @property
    def _size(self) -> int:
        """Of what becomes the prompt, about, in characters."""
        said = sum(len(message.content) + len(message.reasoning or "") for message in self.messages)
        return self.call.size + said


async def make_plan(
    service: Service, store: ResponseStore, call: Call[ResponseRequest], memory: Memory | None = None
) -> ResponsePlan:
    """`memory`: of responses that are not in the store. Raises APIError that names the parameter."""
    body, owner = call.body, call.caller.name
    if body.prompt:
        raise unsupported(
            "prompt", "it names a template that OpenAI stores; send its text as 'instructions' and 'input'"
        )
    if body.background and body.store is False:
        raise invalid("background", "a response in the background must be stored")
    if body.conversation_id is not None and body.previous_response_id is not None:
        raise invalid("conversation", "it cannot stand beside 'previous_response_id'")
    given, trigger = without_trigger(body.input)
    if trigger:
        body = msgspec.structs.replace(body, input=given)
        call = call.with_body(body)
    threads = call.caller.threads
    if body.conversation_id is None:
        past = await _past_responses(store, memory, body.previous_response_id, call)
    else:
        past = await _past_conversation(store, body.conversation_id, call)
    found, calls = await referenced(store, body.input, "input", call.size, call.caller)

    def said() -> tuple[ClientTools, list[Object], tuple[Message, ...], ResponseRequest]:
        items = input_items(body.input, found)
        if body.conversation_id is not None:
            refuse_duplicates(items, (item["id"] for given, _ in past.parts for item in given), "input")
        earlier = (tool for given, _ in past.parts for tool in new_tools(given, past.param))
        tools = ClientTools(body.tools or (), [*earlier, *new_tools(items, "input")])
        history, wanted = ItemHistory(tools, store.seal), body
        for given, calls_in in past.parts:
            wanted = configured(wanted, given, past.param)
            history.add(given, calls_in, past.param, kept=True)
        history.add(items, calls, "input")
        return tools, items, history.messages(), configured(wanted, items, "input")

    tools, items, messages, body = await run_in_thread(said, call.size + past.size, threads)
    if body.instructions:
        messages = (Message("developer", body.instructions), *messages)
    try:
        toolbox = service.tools.toolbox(builtin_tools(body.tools or ()), body.max_tool_calls, past.state, owner)
    except ValueError as error:
        raise invalid("tools", str(error)) from None
    lacking = left_out(body.tools or (), toolbox.names)
    leave_out(lacking, len(body.tools or ()) - len(lacking), body.tool_choice)
    listings = (item for given, _ in past.parts for item in given if item["type"] == "mcp_list_tools")
    return ResponsePlan(
        id=new_id("resp"),
        owner=owner,
        call=call.with_body(body),
        include=included(body.include),
        input=items,
        messages=messages,
        tools=tools,
        toolbox=toolbox,
        listed=frozenset(str(item.get("server_label")) for item in listings),
        trigger=trigger,
    )


@dataclass(frozen=True, slots=True)
class _Past:
    """What was said before a request: items, and the built-in calls among them by id."""

    param: str  # that names it
    parts: Sequence[tuple[list[Object], Mapping[str, Sequence[str]]]] = ()
    state: Object | None = None  # of the built-in tools
    size: int = 0  # bytes


async def _past_responses(
    store: ResponseStore, memory: Memory | None, response_id: str | None, call: Call[ResponseRequest]
) -> _Past:
    param = "previous_response_id"
    chain = await _chain(store, memory, response_id, call.caller.name)
    size = _bounded(sum(len(stored.input) + len(stored.body) for stored in chain), param)

    def decoded() -> _Past:
        kept = [msgspec.json.decode(stored.body, type=KeptResponse) for stored in chain]
        if chain and (chain[-1].running or kept[-1].response.status not in TERMINAL):
            raise invalid(param, f"the response '{chain[-1].id}' is still being made")
        parts: list[tuple[list[Object], Mapping[str, Sequence[str]]]] = []
        for stored, of in zip(chain, kept, strict=True):
            parts += [(msgspec.json.decode(stored.input), {}), (of.response.output, of.calls)]
        return _Past(param, parts, kept[-1].tools if kept else None, size)

    return await run_in_thread(decoded, size, call.caller.threads)


async def _past_conversation(store: ResponseStore, conversation_id: str, call: Call[ResponseRequest]) -> _Past:
    param = "conversation"
    found = await store.read_conversation(lambda tables, db: tables.get(db, conversation_id, call.caller.name))
    if found is None:
        raise conversation_not_found(conversation_id, param)
    size = _bounded(found.size, param)
    bodies = await store.read_conversation(lambda tables, db: tables.items(db, conversation_id))

    def decoded() -> _Past:
        kept = [msgspec.json.decode(body, type=KeptItem) for body in bodies]
        calls = {of.item["id"]: of.call for of in kept if of.call is not None}
        return _Past(param, [([of.item for of in kept], calls)], msgspec.json.decode(found.state), size)

    return await run_in_thread(decoded, size, call.caller.threads)


def _bounded(size: int, param: str) -> int:
    if size > _MAX_CHAIN_BYTES:
        raise invalid(param, f"the conversation so far is larger than {_MAX_CHAIN_BYTES} bytes")
    return size


def conversation_not_found(conversation_id: str, param: str | None = None) -> APIError:
    message = f"The conversation '{conversation_id}' is not stored on this server."
    return not_found(message, "conversation_not_found", param)


async def _chain(
    store: ResponseStore, memory: Memory | None, response_id: str | None, owner: str
) -> list[StoredResponse]:
    """The responses that this one continues, the oldest first."""
    if response_id is None:
        return []
    recent = [] if memory is None else memory.chain(response_id)
    before = recent[0].previous if recent else response_id
    chain = [*([] if before is None else await store.chain(before, owner)), *recent]
    if not chain or chain[0].previous is not None:
        what = "is not" if not chain else "continues one that is no longer"
        message = f"The response '{response_id}' {what} stored on this server."
        raise not_found(message, "previous_response_not_found", "previous_response_id")
    return chain


async def referenced(
    store: ResponseStore, given: str | Sequence[Object], where: str, size: int, caller: Caller
) -> tuple[dict[str, Object], dict[str, Sequence[str]]]:
    """The stored items that the input refers to, and the built-in calls among them.

    `where`: the parameter that the input came in. `size`: of the request, in bytes. Raises APIError.
    """
    ids = await run_in_thread(lambda: references(given, where), size, caller.threads)
    if len(ids) > _MAX_REFERENCES:
        raise invalid(where, f"it refers to more than {_MAX_REFERENCES} stored items")
    stored = await store.items(ids, caller.name) if ids else {}

    def decoded() -> dict[str, KeptItem]:
        return {item_id: msgspec.json.decode(item, type=KeptItem) for item_id, item in stored.items()}

    kept = await run_in_thread(decoded, sum(map(len, stored.values())), caller.threads)
    found = {item_id: item.item for item_id, item in kept.items()}
    return found, {item_id: item.call for item_id, item in kept.items() if item.call is not None}


def _form(body: ResponseRequest) -> Form | None:
    return only_form([*_text_format(body)[0], *extensions(body)])


def _text_format(body: ResponseRequest) -> tuple[list[Form], ResponseSchema | None]:
    """What `text` enforces of the final message, and what the model is told of it."""
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type == "text":
        return [], None
    if wanted.type == "json_object":
        schema = ResponseSchema("json_object", {"type": "object"})
        return [Form(JsonFormat(schema.schema), "text.format")], schema
    if wanted.type != "json_schema":
        raise invalid("text.format.type", f"it is 'text', 'json_object' or 'json_schema', not {wanted.type!r}")
    if wanted.name is None or wanted.schema is None:
        raise invalid(f"text.format.{'name' if wanted.name is None else 'schema'}", "a JSON schema needs it")
    check_name(wanted.name, "text.format.name")
    schema = ResponseSchema(wanted.name, wanted.schema, wanted.description or "")
    form = JsonFormat(wanted.schema, wanted.strict is False, any_format=wanted.strict is not True)
    return [Form(form, "text.format")], schema
