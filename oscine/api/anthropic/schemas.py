"""The JSON of Anthropic's Messages API, as msgspec structs. Values are checked in request.

oscine.api.serving.parameters defines the treatment of each parameter.
"""

from typing import Annotated, Any, Literal

from msgspec import Struct

from oscine.api.serving.parameters import Refused, about, ignored
from oscine.chat.effort import Effort


class Block(Struct):
    """A part of a message; which fields it has depends on its type."""

    type: Annotated[str, about("`text`, `thinking`, `redacted_thinking`, `tool_use` or `tool_result`.")]
    text: Annotated[str | None, about("What a text says.")] = None
    thinking: Annotated[str | None, about("What was thought.")] = None
    id: Annotated[str | None, about("Of a call.")] = None
    name: Annotated[str | None, about("The tool that was called.")] = None
    input: Annotated[dict[str, Any] | None, about("The arguments of a call.")] = None
    tool_use_id: Annotated[str | None, about("The call whose result this is.")] = None
    content: Annotated[Any, about("A result: a text or blocks.")] = None
    is_error: Annotated[bool | None, about("Whether the result says that the call failed.")] = None


class AnthropicMessage(Struct):
    role: Annotated[Literal["user", "assistant", "system"], about("Who speaks.")]
    content: Annotated[str | list[Block], about("A text or blocks.")]


class AnthropicTool(Struct):
    name: Annotated[str, about("Letters, digits, `_` and `-`.")]
    type: Annotated[str | None, about("Absent or `custom`: a function. Other types are left out.")] = None
    description: Annotated[str | None, about("What it does; the model reads it.")] = None
    input_schema: Annotated[dict[str, Any] | None, about("The JSON schema of its arguments.")] = None
    strict: Annotated[bool | None, about("Whether the schema is enforced (default false).")] = None


class AnthropicToolChoice(Struct):
    type: Annotated[Literal["auto", "any", "tool", "none"], about("`any` and `tool` require a call.")]
    name: Annotated[str | None, about("The tool that must be called.")] = None
    disable_parallel_tool_use: Annotated[bool | None, about("Whether a turn has one call at most.")] = None


class Thinking(Struct):
    type: Annotated[
        Literal["enabled", "adaptive", "between_tools", "disabled"],
        about("Whether the answer shows what was thought; `disabled` is the effort `none`."),
    ]
    budget_tokens: Annotated[int | None, about("Tokens after which reasoning ends and the answer begins.")] = None
    display: Annotated[Literal["summarized", "omitted"] | None, about("`omitted` leaves the text out.")] = None


class OutputFormat(Struct):
    type: Annotated[Literal["json_schema"], about("The only form there is.")]
    schema: Annotated[dict[str, Any], about("The JSON schema; it is enforced.")]


class OutputConfig(Struct):
    effort: Annotated[Effort | None, about("How much the model thinks (default `medium`).")] = None
    format: Annotated[OutputFormat | None, about("The form of the answer.")] = None


class CountTokensRequest(Struct, kw_only=True):
    """The parameters of a prompt. None is "not given" throughout."""

    model: Annotated[str, about("The name of a model.")]
    messages: Annotated[list[AnthropicMessage], about("The conversation so far, the newest message last.")]
    system: Annotated[str | list[Block] | None, about("What the model is told before the conversation.")] = None
    tools: Annotated[list[AnthropicTool] | None, about("Functions that the model may call.")] = None
    tool_choice: Annotated[AnthropicToolChoice | None, about("Which may, or must, be called.")] = None
    thinking: Annotated[Thinking | None, about("How the model thinks, and what of it is shown.")] = None
    output_config: Annotated[OutputConfig | None, about("Effort, and form of the answer.")] = None
    thread: Annotated[Any, about("Not supported: the error makes clients go on without threads.", type="null")] = None
    cache_control: Annotated[Any, ignored("prefixes are always cached")] = None
    context_management: Annotated[Any, ignored("what does not fit the context is refused, never cleared")] = None
    speed: Annotated[Any, ignored("there is one")] = None
    betas: Annotated[Any, ignored("features are there without")] = None
    compaction: Refused = None
    mcp_servers: Refused = None
    container: Refused = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Annotated[int, about("Tokens that are generated at most, reasoning included.")]
    stream: Annotated[bool | None, about("Whether the answer comes as events.")] = None
    stop_sequences: Annotated[list[str] | None, about("Texts that end the answer.")] = None
    temperature: Annotated[float | None, about("0 is greedy (default 1).", minimum=0, maximum=2)] = None
    top_p: Annotated[float | None, about("As in chat completions.", minimum=0, maximum=1)] = None
    top_k: Annotated[int | None, about("As in chat completions.", minimum=-1)] = None
    cache_salt: Annotated[str | None, about("Cached prefixes are shared within one salt alone, as in vLLM.")] = None
    metadata: Annotated[Any, ignored("logs and limits go by API key")] = None
    service_tier: Annotated[Any, ignored("there is one")] = None
    inference_geo: Annotated[Any, ignored("the server is where it is")] = None
    billing_policy: Annotated[Any, ignored("nothing is billed")] = None
    diagnostics: Annotated[Any, ignored("see /metrics")] = None
    fallbacks: Annotated[Any, ignored("there is no other model to fall back on")] = None
    fallback_credit_token: Annotated[Any, ignored("nothing is billed")] = None
    user_profile_id: Annotated[Any, ignored("logs and limits go by API key")] = None
    workspace_id: Annotated[Any, ignored("logs and limits go by API key")] = None
