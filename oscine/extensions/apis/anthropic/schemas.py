"""The JSON of Anthropic's Messages API, as msgspec structs.

oscine.api.serving.parameters defines the treatment of each parameter.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from oscine.api.serving.parameters import (
    MAX_TOOLS,
    REFUSES,
    REFUSES_BUT,
    Positive,
    Share,
    ShortText,
    StopTexts,
    Temperature,
    TopK,
    about,
    shares,
    unused,
)
from oscine.chat.effort import Effort

# Extensions, as chat completions have them.
SHARED = """
    min_p presence_penalty frequency_penalty repetition_penalty logit_bias seed min_tokens ignore_eos stop_token_ids
    priority guided_json guided_regex guided_choice guided_grammar structured_outputs json_schema regex ebnf grammar
"""


class Block(Struct, gc=False):
    """A part of a message; which fields it has depends on its type."""

    type: Annotated[str, about("`text`, `thinking`, `tool_use`, `tool_result` and others.")]
    text: Annotated[str | None, about("The text of a block of type `text`.")] = None
    thinking: Annotated[str | None, about("The reasoning.")] = None
    id: Annotated[str | None, about("The id of a call.")] = None
    name: Annotated[str | None, about("The tool that was called.")] = None
    input: Annotated[dict[str, Any] | None, about("The arguments of a call.")] = None
    tool_use_id: Annotated[str | None, about("The call whose result this is.")] = None
    content: Annotated[Any, about("A result: a text or blocks.")] = None
    source: Annotated[Any, about("What a picture, a document or a search result is made of.")] = None
    title: Annotated[str | None, about("The name of a document or of a search result.")] = None
    context: Annotated[str | None, about("About a document.")] = None
    is_error: Annotated[bool | None, about("Whether the result says that the call failed.")] = None
    encrypted_content: Annotated[str | None, about("Of a `compaction`: to be sent back unchanged.")] = None
    signature: Annotated[str | None, about("The same; also of `thinking`, where it is not read.")] = None
    tool: Annotated[Any, about("The tool of a `tool_addition` or a `tool_removal` in a system message.")] = None


class AnthropicMessage(Struct, gc=False):
    role: Annotated[Literal["user", "assistant", "system"], about("The author of the message.")]
    content: Annotated[str | list[Block], about("A text or blocks.")]
    clear_at: Annotated[
        Literal["next_user_message", "never"] | None, about("When a system message's text is no longer shown.")
    ] = None


class AnthropicTool(Struct):
    name: Annotated[str, about("Letters, digits, `_` and `-`. A function needs it; some other types have none.")] = ""
    type: Annotated[
        str | None,
        about("Absent or `custom`: a function. `web_search_...`: the server's browser. Others are left out."),
    ] = None
    description: Annotated[str | None, about("What it does; the model reads it.")] = None
    input_schema: Annotated[dict[str, Any] | None, about("The JSON schema of its arguments.")] = None
    strict: Annotated[bool | None, about("Whether the schema is enforced (default false).")] = None
    defer_loading: Annotated[bool | None, about("True declares it only where a `tool_reference` names it.")] = None
    max_uses: Annotated[Positive | None, about("Searches at most.")] = None
    allowed_domains: Annotated[list[str] | None, about("Not supported, and refused for a search.")] = None
    blocked_domains: Annotated[list[str] | None, about("Not supported, and refused for a search.")] = None


Tools = Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)]


class AnthropicToolChoice(Struct):
    type: Annotated[Literal["auto", "any", "tool", "none"], about("`any` and `tool` require a call.")]
    name: Annotated[str | None, about("The tool that must be called.")] = None
    disable_parallel_tool_use: Annotated[bool | None, about("Whether a turn has one call at most.")] = None


class Thinking(Struct):
    type: Annotated[
        Literal["enabled", "adaptive", "between_tools", "disabled"],
        about("Whether the answer shows the reasoning; `disabled` is the effort `none`."),
    ]
    budget_tokens: Annotated[Positive | None, about("Tokens after which reasoning ends and the answer begins.")] = None
    display: Annotated[Literal["summarized", "updates", "omitted"] | None, about("`omitted` leaves the text out.")] = (
        None
    )


class OutputFormat(Struct):
    type: Annotated[Literal["json_schema"], about("The only form there is.")]
    schema: Annotated[dict[str, Any], about("The JSON schema; it is enforced.")]


class OutputConfig(Struct):
    effort: Annotated[Effort | None, about("How much the model thinks (default `medium`).")] = None
    format: Annotated[OutputFormat | None, about("The form of the answer.")] = None


class InputTokens(Struct):
    type: Annotated[Literal["input_tokens"], about("The only kind there is.")]
    value: Annotated[Positive, about("Tokens of a prompt from which on it is compacted.")]


class CompactEdit(Struct):
    trigger: Annotated[InputTokens | None, about("When (default: at 150,000 tokens, or 75 % of the context).")] = None
    pause_after_compaction: Annotated[bool | None, about("Whether the answer ends with the compaction.")] = None
    instructions: Annotated[str | None, about("What a summary is to say beside.")] = None


class ContextManagementConfig(Struct):
    edits: Annotated[
        list[dict[str, Any]], about("`compact_20260112` compacts the conversation; what others clear is kept.")
    ] = []


class CompactionRequest(Struct):
    type: Annotated[Literal["summarize"], about("The only kind there is.")]
    instructions: Annotated[str | None, about("How the summary is asked for, in place of the server's words.")] = None


@unused(
    ignores={
        "prefixes are always cached": "cache_control",
        "there is only one": "speed",
        "features need no name of a beta": "betas",
    },
    refuses="mcp_servers container",
)
class CountTokensRequest(Struct, kw_only=True):
    """The parameters of a prompt. None is "not given" throughout."""

    model: Annotated[str, about("The name of a model.")]
    messages: Annotated[list[AnthropicMessage], about("The conversation so far, the newest message last.")]
    system: Annotated[str | list[Block] | None, about("A system message before the conversation.")] = None
    tools: Annotated[Tools | None, about("Functions that the model may call.")] = None
    tool_choice: Annotated[AnthropicToolChoice | None, about("Which tools may, or must, be called.")] = None
    thinking: Annotated[Thinking | None, about("The budget of the reasoning, and whether it is shown.")] = None
    output_config: Annotated[OutputConfig | None, about("Effort, and form of the answer.")] = None
    context_management: Annotated[
        ContextManagementConfig | None, about("When the conversation is compacted before the answer.")
    ] = None
    compaction: Annotated[CompactionRequest | None, about("Compacts, and answers nothing else.")] = None
    thread: Annotated[Any, about("Not supported: the error makes clients go on without threads.", type="null")] = None


@unused(
    ignores={
        "there is only one": "service_tier",
        "logs and limits go by API key": "metadata user_profile_id workspace_id",
        "a server has one location": "inference_geo",
        "nothing is billed": "billing_policy fallback_credit_token",
        "see /metrics": "diagnostics",
        "there is no other model to fall back on": "fallbacks",
    },
    refuses=f"{REFUSES} logprobs top_logprobs response_format return_token_ids",
    refuses_but={**REFUSES_BUT, "n": 1},
)
@shares(SHARED)
class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Annotated[Positive, about("Tokens that are generated at most, reasoning included.")]
    stream: Annotated[bool | None, about("Whether the answer comes as events.")] = None
    stop_sequences: Annotated[StopTexts | None, about("Texts that end the answer.")] = None
    temperature: Annotated[Temperature | None, about("0 is greedy (default 1).")] = None
    top_p: Annotated[Share | None, about("As in chat completions.")] = None
    top_k: Annotated[TopK | None, about("As in chat completions.")] = None
    cache_salt: Annotated[ShortText | None, about("Cached prefixes are shared by requests with the same salt.")] = None
