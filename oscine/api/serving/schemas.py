"""The JSON of requests for chat and text completions, as msgspec structs with strict types.

oscine.api.serving.parameters says what is done with each parameter.
"""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from oscine.api.common.asgi import Scope
from oscine.api.common.errors import APIError, from_validation, invalid
from oscine.api.common.keys import Caller
from oscine.api.common.memory import Held, memory_of
from oscine.api.common.work import INLINE_SIZE, run_in_thread
from oscine.api.serving.parameters import (
    MAX_TOOLS,
    Natural,
    Positive,
    SamplingFields,
    TopLogprobs,
    about,
    ignored,
    refuse,
    unused,
)
from oscine.chat.effort import EFFORTS, Effort
from oscine.system.collector import set_apart
from oscine.system.json_text import decode_json

Role = Literal["system", "developer", "user", "assistant", "tool"]
Verbosity = Literal["low", "medium", "high"]
_EFFORT = "How much the model thinks (default `medium`): of the model's three efforts the nearest is meant."


class ContentPart(Struct, gc=False):
    type: Annotated[str, about("`text` or `refusal`.")]
    text: Annotated[str | None, about("The text of a part of type `text`.")] = None
    refusal: Annotated[str | None, about("The text of a part of type `refusal`.")] = None
    image_url: Annotated[Any, about("A picture in a tool's result; the model reads what was there.")] = None
    file: Annotated[Any, about("A file in a tool's result; text is read as text.")] = None
    input_audio: Annotated[Any, about("Sound in a tool's result; the model reads what was there.")] = None
    tool_name: Annotated[str | None, about("A function that was found, in a `tool_reference` of a tool's result.")] = (
        None
    )


def content_text(content: str | Sequence[Any] | None, kinds: Collection[str], where: str) -> str:
    """A text, or parts of one, as one text. `kinds`: types of the parts that are read. `where`: path of the content.

    Parts are joined without a separator, as openai-harmony does: clients may cut a text anywhere. Raises APIError for a
    part of another type, and for an empty one.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part_text(part, kinds, f"{where}[{i}]") for i, part in enumerate(content))


def part_text(part: Any, kinds: Collection[str], where: str) -> str:
    """The text of a ContentPart, or of a record like it."""
    if part.type not in kinds:
        raise not_read(part.type, f"{where}.type")
    field = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, field)
    if text is None:
        raise invalid(f"{where}.{field}", f"a part of type {part.type!r} needs it")
    return text


def not_read(kind: str, where: str) -> APIError:
    """For what a user shows. Clients search the message for these words, and go on without the picture or document."""
    known = ""
    if kind in ("image", "image_url", "input_image"):
        known = "Could not process image. The image data you provided does not represent a valid image: "
    elif kind in ("document", "file", "input_file"):
        known = f"Could not process {kind}. The PDF specified was not valid: "
    return invalid(where, f"{known}the model reads text, not {kind!r}")


class FunctionCall(Struct, gc=False):
    name: Annotated[str, about("The function's name.")]
    arguments: Annotated[str, about("The arguments as JSON text.")]


def arguments_object(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object. A text that is no JSON object is kept in the field `invalid_json`."""
    try:
        return decode_json(arguments or "{}", dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"invalid_json": arguments}


class CustomCall(Struct, gc=False):
    name: Annotated[str, about("The custom tool's name.")]
    input: Annotated[str, about("The text that it got.")]


class ToolCall(Struct, gc=False):
    id: Annotated[str, about("The id that the message with the result refers to.")]
    function: Annotated[FunctionCall | None, about("The called function.")] = None
    custom: Annotated[CustomCall | None, about("The called custom tool.")] = None
    type: Annotated[Literal["function", "custom"], about("Which of the two was called.")] = "function"


class Message(Struct, gc=False):
    role: Annotated[Role, about("The author of the message.")]
    content: Annotated[str | list[ContentPart] | None, about("A text, or parts of one.")] = None
    name: Annotated[str | None, about("The function whose result this is, where there is no `tool_call_id`.")] = None
    reasoning: Annotated[str | None, about("The assistant's reasoning.")] = None
    reasoning_content: Annotated[str | None, about("The same as `reasoning`, as other servers name it.")] = None
    tool_calls: Annotated[list[ToolCall] | None, about("Calls that the assistant made.")] = None
    tool_call_id: Annotated[str | None, about("The call whose result this is.")] = None


class Function(Struct):
    name: Annotated[str, about("Letters, digits, `_` and `-`.")]
    description: Annotated[str | None, about("What it does; the model reads it.")] = None
    parameters: Annotated[dict[str, Any] | None, about("The JSON schema of its arguments.")] = None
    strict: Annotated[bool | None, about("Whether the schema is enforced (default false).")] = None


class InputGrammar(Struct):
    syntax: Annotated[Literal["lark", "regex"], about("How the grammar is written.")]
    definition: Annotated[str, about("The grammar.")]


class InputFormat(Struct):
    type: Annotated[Literal["text", "grammar"], about("Any text, or text with a grammar.")]
    grammar: Annotated[InputGrammar | None, about("For the type `grammar`; it is enforced.")] = None


class CustomTool(Struct):
    name: Annotated[str, about("Letters, digits, `_` and `-`.")]
    description: Annotated[str | None, about("What it does; the model reads it.")] = None
    format: Annotated[InputFormat | None, about("The form of its input (default: any text).")] = None


class Tool(Struct):
    type: Annotated[str, about("`function` or `custom`; tools of other types are left out.")]
    function: Annotated[Function | None, about("The function.")] = None
    custom: Annotated[CustomTool | None, about("The custom tool: its input is plain text.")] = None
    defer_loading: Annotated[
        bool | None, about("True declares it only where a tool's result refers to it, so that prefixes stay cached.")
    ] = None


class NamedFunction(Struct):
    name: Annotated[str, about("One of the functions, or of the custom tools, in `tools`.")]


class NamedToolChoice(Struct, tag_field="type", tag="function"):
    function: Annotated[NamedFunction, about("The function that must be called.")]


class NamedCustomChoice(Struct, tag_field="type", tag="custom"):
    custom: Annotated[NamedFunction, about("The custom tool that must be called.")]


class AllowedTool(Struct):
    function: Annotated[NamedFunction | None, about("A function that may be called.")] = None
    custom: Annotated[NamedFunction | None, about("A custom tool that may be called.")] = None
    type: Annotated[Literal["function", "custom"], about("Which of the two it is.")] = "function"


class AllowedTools(Struct):
    mode: Annotated[Literal["auto", "required"], about("Whether one of them must be called.")]
    tools: Annotated[list[AllowedTool], Meta(max_length=MAX_TOOLS), about("The tools that may be called.")]


class AllowedToolsChoice(Struct, tag_field="type", tag="allowed_tools"):
    allowed_tools: Annotated[AllowedTools, about("Which functions may be called, of all that are shown.")]


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoiceField = Literal["none", "auto", "required"] | NamedToolChoice | NamedCustomChoice | AllowedToolsChoice | None


class JsonSchema(Struct):
    name: Annotated[str, about("The name of the form; the model reads it.")]
    schema: Annotated[dict[str, Any] | None, about("The JSON schema.")] = None
    description: Annotated[str | None, about("What the form is for; the model reads it.")] = None
    strict: Annotated[
        bool | None, about("False ignores keywords that cannot be enforced; true refuses unknown formats.")
    ] = None


class ResponseFormat(Struct):
    type: Annotated[str, about("`text`, `json_object` or `json_schema`.")]
    json_schema: Annotated[JsonSchema | None, about("For the type `json_schema`.")] = None
    enforce: Annotated[bool | None, about("False only shows the form to the model. Oscine's own.")] = None


class ReasoningOptions(Struct):
    effort: Annotated[Effort | None, about("The same as `reasoning_effort`.")] = None
    enabled: Annotated[bool | None, about("False is the effort `none`.")] = None
    max_tokens: Annotated[Natural | None, about("The same as `thinking_token_budget`.")] = None
    exclude: Annotated[bool | None, about("True leaves the reasoning out of the answer.")] = None


class TemplateOptions(Struct, forbid_unknown_fields=True):
    """Keywords of chat templates that clients send. `enable_thinking` and `thinking` belong to other models."""

    reasoning_effort: Annotated[Effort | None, about("The same as `reasoning_effort` of the request.")] = None
    enable_thinking: Annotated[bool | None, about("False is the effort `none`.")] = None
    thinking: Annotated[bool | None, about("False is the effort `none`.")] = None


class ThinkingOptions(Struct):
    """The `thinking` parameter of DeepSeek, Kimi and GLM."""

    type: Annotated[Literal["enabled", "disabled", "adaptive", "auto"], about("`disabled` is the effort `none`.")]
    budget_tokens: Annotated[Natural | None, about("The same as `thinking_token_budget`.")] = None


_CHAT_REFUSES = """
    functions function_call audio web_search_options chat_template continue_final_message echo documents input_ids task
"""


@unused(
    refuses=_CHAT_REFUSES,
    refuses_but={"modalities": ["text"], "add_generation_prompt": True, "separate_reasoning": True},
)
class ChatCompletionRequest(SamplingFields, kw_only=True):
    messages: Annotated[list[Message], about("The conversation so far, the newest message last.")]
    max_completion_tokens: Annotated[Positive | None, about("The newer name of `max_tokens`.")] = None
    logprobs: Annotated[bool | None, about("Whether the content's tokens come with log-probabilities.")] = None
    top_logprobs: Annotated[TopLogprobs | None, about("Alternatives per token; needs `logprobs`.")] = None
    tools: Annotated[Tools | None, about("Tools that the model may call; other types are left out.")] = None
    tool_choice: Annotated[ToolChoiceField, about("Which functions may, or must, be called (default `auto`).")] = None
    parallel_tool_calls: Annotated[bool | None, about("Whether a turn may have several calls (default true).")] = None
    response_format: Annotated[ResponseFormat | None, about("The form of the answer; it is enforced.")] = None
    reasoning_effort: Annotated[Effort | None, about(_EFFORT)] = None
    reasoning: Annotated[ReasoningOptions | None, about("Effort, budget and display of the reasoning.")] = None
    chat_template_kwargs: Annotated[TemplateOptions | None, about("Keywords of chat templates.")] = None
    think: Annotated[bool | Effort | None, about("An effort, as Ollama has it; false is `none`.")] = None
    thinking: Annotated[ThinkingOptions | None, about("Whether, and how long, the model thinks.")] = None
    enable_thinking: Annotated[bool | None, about("False is the effort `none`.")] = None
    thinking_token_budget: Annotated[Natural | None, about("Tokens after which the reasoning ends.")] = None
    verbosity: Annotated[Verbosity | None, ignored("the model knows no verbosity")] = None
    include_reasoning: Annotated[bool | None, about("False leaves the reasoning out of the answer.")] = None
    final_headroom: Annotated[Natural | None, about("Tokens of the budget that are kept for the answer.")] = None
    return_token_ids: Annotated[bool | None, about("Whether the answer has the ids of all its tokens.")] = None


@unused(refuses="suffix prompt_embeds")
class CompletionRequest(SamplingFields, kw_only=True):
    prompt: Annotated[str | list[Any], about("A text, texts, token ids, or lists of token ids.")]
    echo: Annotated[bool | None, about("Whether the answer begins with the prompt.")] = None
    logprobs: Annotated[TopLogprobs | None, about("Alternatives per token, with log-probabilities.")] = None
    skip_special_tokens: Annotated[bool | None, about("False shows special tokens by name (default true).")] = None
    response_format: Annotated[ResponseFormat | None, about("The form of the whole text; it is enforced.")] = None
    best_of: Annotated[int | None, about("The same as `n`; other values are refused.")] = None
    return_token_ids: Annotated[bool | None, about("Whether the answer has the ids of all its tokens.")] = None


class TokenizeRequest(Struct):
    """Either a text, or messages and the other parameters of a chat completion on which its prompt depends."""

    model: Annotated[str | None, about("The name of a model. A server with one model needs none.")] = None
    prompt: Annotated[str | None, about("A text.")] = None
    messages: Annotated[list[Message] | None, about("A conversation.")] = None
    tools: Annotated[Tools | None, about("Functions that the prompt shows.")] = None
    reasoning_effort: Annotated[Effort | None, about(_EFFORT)] = None
    chat_template_kwargs: Annotated[TemplateOptions | None, about("Keywords of chat templates.")] = None
    tool_choice: Annotated[ToolChoiceField, about("`none` hides the functions.")] = None
    response_format: Annotated[ResponseFormat | None, about("The form that the prompt shows.")] = None
    add_generation_prompt: Annotated[bool | None, about("False leaves out the header of the answer to come.")] = None
    return_token_strs: Annotated[bool | None, about("Whether the text of each token comes too.")] = None


class DetokenizeRequest(Struct):
    tokens: Annotated[list[int], about("Token ids.")]
    model: Annotated[str | None, about("The name of a model. A server with one model needs none.")] = None


T = TypeVar("T")

_FEW_KEYS = 1 << 14  # of a body whose parameters are all looked at, to name the longest
_CHOICES = {
    "role": get_args(Role),
    "reasoning_effort": EFFORTS,
    "effort": EFFORTS,
    "verbosity": get_args(Verbosity),
}


async def decode(body: bytes, type: type[T], scope: Scope) -> T:
    """The request, made beside the event loop from a large body. `scope`: of the request, which holds the memory.

    Raises APIError for invalid JSON, for a parameter that has the wrong type or is refused, and where memory is short.
    """
    caller = Caller.of(scope)
    values = await run_in_thread(lambda: _memory_of(body), len(body), caller.decoding)
    if not caller.in_batch:
        Held.of(scope).take(values)
    request = await run_in_thread(lambda: _decoded(body, type), len(body), caller.decoding)
    refuse(request)
    return request


def _memory_of(body: bytes) -> int:
    try:
        return memory_of(body)
    except ValueError as error:
        raise _too_many_values(body, str(error)) from None


def _decoded(body: bytes, type: type[T]) -> T:
    try:
        with set_apart() if len(body) > INLINE_SIZE else nullcontext():
            return decode_json(body, type)
    except msgspec.ValidationError as error:
        raise from_validation(error, choices=_CHOICES) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise APIError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise APIError("The JSON of the body is nested too deeply.", code="invalid_json") from None


def of_objects(fields: dict[str, Any], type: type[T]) -> T:
    """The same for a request that is given as plain objects."""
    try:
        request = msgspec.convert(fields, type)
    except msgspec.ValidationError as error:
        raise from_validation(error, choices=_CHOICES) from None
    refuse(request)
    return request


class _Longest(Struct):
    """The parameters that are long in usual requests."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    tokens: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()


def _too_many_values(body: bytes, why: str) -> APIError:
    """The error for a body with too many values; names the longest parameter."""
    few = body.count(b":") <= _FEW_KEYS
    try:
        found: Any = msgspec.json.decode(body, type=dict[str, msgspec.Raw] if few else _Longest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return APIError(f"Invalid request: {why}.")
    params: dict[str, msgspec.Raw] = found if few else msgspec.structs.asdict(found)
    sizes = {param: len(memoryview(value)) for param, value in params.items()}
    longest = max(sizes, key=sizes.__getitem__, default="")
    known = sizes.get(longest, 0) > len(body) // 2
    return invalid(longest, why) if known else APIError(f"Invalid request: {why}.")


def convert(value: Any, type: type[T], where: str) -> T:
    """Converts a part of the body that was decoded as plain objects; `where` is its path."""
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        raise from_validation(error, where) from None
