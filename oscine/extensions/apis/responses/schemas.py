"""The JSON of requests for responses, their query parameters and their answers, as msgspec structs.

Items of the input and tools are plain objects here: clients send unknown types, and items are kept as they came. The
modules input and tools read them.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.datastructures import QueryParams

from oscine.api.common.errors import from_validation
from oscine.api.common.ids import Id
from oscine.api.common.paging import PageQuery
from oscine.api.serving.parameters import MAX_TOOLS, Positive, SamplingFields, TopLogprobs, about, ignored, unused
from oscine.api.serving.schemas import Verbosity
from oscine.chat.effort import Effort
from oscine.extensions.apis.responses.view import Object

T = TypeVar("T", bound=Struct)

Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
Truncation = Literal["auto", "disabled"]
Summary = Literal["auto", "concise", "detailed"]


class ReasoningConfig(Struct):
    effort: Annotated[Effort | None, about("How much the model thinks (default `medium`).")] = None
    summary: Annotated[Summary | None, about("Whether reasoning is shown as a summary too; all say the same.")] = None
    generate_summary: Annotated[Summary | None, about("The old name of `summary`.")] = None


class TextFormatConfig(Struct):
    type: Annotated[str, about("`text`, `json_object` or `json_schema`.")] = "text"
    name: Annotated[str | None, about("The name of the form; the model reads it.")] = None
    schema: Annotated[dict[str, Any] | None, about("The JSON schema.")] = None
    description: Annotated[str | None, about("What the form is for; the model reads it.")] = None
    strict: Annotated[
        bool | None, about("False ignores keywords that cannot be enforced; true refuses unknown formats.")
    ] = None


class TextConfig(Struct):
    format: Annotated[TextFormatConfig | None, about("The form of the answer; it is enforced.")] = None
    verbosity: Annotated[Verbosity | None, ignored("the model knows no verbosity")] = None


class ConversationId(Struct):
    id: Annotated[Id, about("The id of a conversation.")]


Conversation = Id | ConversationId | None
_CONVERSATION = "A stored conversation that this continues, and that gets its items."


class ContextManagement(Struct):
    type: Annotated[Literal["compaction"], about("The only kind there is.")]
    compact_threshold: Annotated[
        Positive | None, about("Tokens of a prompt from which on it is compacted first (default: 75 % of the context).")
    ] = None


_REFUSES = """
    image n stop max_tokens min_tokens ignore_eos stop_token_ids
    return_token_ids thinking_token_budget
"""


@unused(
    ignores={"they are OpenAI's": "access_programs", "see `background`": "background_options"},
    refuses=_REFUSES,
)
class ResponseRequest(SamplingFields, kw_only=True):
    input: Annotated[str | list[dict[str, Any]], about("A text, or items of the conversation so far.")]
    instructions: Annotated[str | None, about("A developer message before the conversation.")] = None
    prompt: Annotated[Any, about("Not supported: a template that is stored with OpenAI.", type="null")] = None
    previous_response_id: Annotated[Id | None, about("The stored response that this one continues.")] = None
    conversation: Annotated[Conversation, about(_CONVERSATION)] = None
    reasoning: Annotated[ReasoningConfig | None, about("Effort and display of the reasoning.")] = None
    text: Annotated[TextConfig | None, about("The form of the answer.")] = None
    tools: Annotated[Tools | None, about("The client's functions, and built-in tools.")] = None
    tool_choice: Annotated[str | Object | None, about("Which tools may, or must, be called (default `auto`).")] = None
    parallel_tool_calls: Annotated[bool | None, about("Whether a turn may have several calls (default true).")] = None
    max_output_tokens: Annotated[int | None, about("Tokens that are generated at most, reasoning included.")] = None
    max_tool_calls: Annotated[Positive | None, about("Calls of built-in tools at most.")] = None
    top_logprobs: Annotated[TopLogprobs | None, about("Alternatives per token.")] = None
    include: Annotated[list[str] | None, about("Further parts of the response's items.")] = None
    metadata: Annotated[Metadata | None, about("Up to 16 pairs that are kept with the response.")] = None
    store: Annotated[bool | None, about("Whether the response is stored (default true).")] = None
    background: Annotated[bool | None, about("Whether it runs on without the client's connection.")] = None
    truncation: Annotated[Truncation | None, ignored("what does not fit the context is refused, never cut")] = None
    context_management: Annotated[
        list[ContextManagement] | None, about("When the conversation is compacted before the answer.")
    ] = None
    user: Annotated[str | None, ignored("it is repeated in the response")] = None
    safety_identifier: Annotated[str | None, ignored("it is repeated in the response")] = None
    prompt_cache_key: Annotated[str | None, ignored("it is repeated in the response; see `cache_salt`")] = None

    @property
    def conversation_id(self) -> str | None:
        given = self.conversation
        return given.id if isinstance(given, ConversationId) else given

    @property
    def summary(self) -> Summary | None:
        asked = self.reasoning or ReasoningConfig()
        return asked.summary or asked.generate_summary


class NoQuery(Struct):
    """No query parameters. The request may still be refused with 400."""


class RetrieveQuery(Struct):
    include: list[str] = []
    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0)] | None = None  # number of an event


class ItemsQuery(PageQuery):
    include: list[str] = []


def read_query(params: QueryParams, kind: type[T]) -> T:
    """Raises APIError that names the parameter. Others are ignored; a list may be written with brackets."""
    given: dict[str, object] = {name: params[name] for name in kind.__struct_fields__ if name in params}
    given["include"] = [*params.getlist("include"), *params.getlist("include[]")]
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(Struct):
    id: str
    object: Literal["response"]
    created_at: int
    status: ResponseStatus
    background: bool
    completed_at: int | None
    error: dict[str, str] | None
    frequency_penalty: float
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Object]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Object
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: Object
    tool_choice: str | Object
    tools: list[Object]
    top_logprobs: int
    top_p: float
    truncation: Truncation
    usage: ResponseUsage | None
    user: str | None
    conversation: dict[str, str] | None = None  # older ones in the store lack it


class ResponseInputTokens(Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class CompactedResponse(Struct):
    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[Object]
    usage: ResponseUsage


class DeletedResponse(Struct):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(Struct):
    object: Literal["list"]
    data: list[Object]
    first_id: str
    last_id: str
    has_more: bool
