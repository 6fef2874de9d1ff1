"""The JSON of Ollama's API, as msgspec structs.

oscine.api.serving.parameters defines the treatment of each parameter.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from oscine.api.serving.logprobs import TokenLogprob
from oscine.api.serving.parameters import (
    MAX_TOOLS,
    REFUSES,
    REFUSES_BUT,
    Int64,
    ShortText,
    StopTexts,
    TopLogprobs,
    about,
    unused,
)
from oscine.api.serving.schemas import Function
from oscine.chat.effort import Effort

# Ollama cuts 5.5 to 5. It has no bounds; these keep float32 from overflowing.
_Whole = Int64 | Annotated[float, Meta(ge=-(1 << 63), lt=1 << 63)]
_Float = Annotated[float, Meta(ge=-1e6, le=1e6)]


class OllamaFunctionCall(Struct):
    name: Annotated[str, about("The function's name.")]
    arguments: Annotated[dict[str, Any], about("The arguments.")] = {}
    index: Annotated[int | None, about("The position of the call in its message.")] = None


class OllamaToolCall(Struct):
    function: Annotated[OllamaFunctionCall, about("The called function.")]
    id: Annotated[str | None, about("The id of the call, for the message with its result.")] = None


class OllamaMessage(Struct):
    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], about("The author of the message.")]
    content: Annotated[str | None, about("The text.")] = None
    thinking: Annotated[str | None, about("The assistant's reasoning.")] = None
    images: Annotated[list[Any] | None, about("In a tool's result: the model reads that there were some.")] = None
    tool_calls: Annotated[list[OllamaToolCall] | None, about("Calls that the assistant made.")] = None
    tool_name: Annotated[str | None, about("The function whose result this is.")] = None
    name: Annotated[str | None, about("The same as `tool_name`.")] = None
    tool_call_id: Annotated[str | None, about("The call whose result this is.")] = None


class OllamaTool(Struct):
    function: Annotated[Function, about("The function.")]
    type: Annotated[str | None, about("`function`.")] = None


_AS_OLLAMA = "mirostat mirostat_tau mirostat_eta tfs_z"


@unused(
    ignores={
        "the context size is the server's; a prompt that does not fit it is refused": "num_ctx num_keep",
        "penalties apply to the whole sequence": "repeat_last_n penalize_newline",
        "the server's options say how the model is loaded": """
            num_batch num_gpu main_gpu num_thread numa low_vram f16_kv use_mmap use_mlock logits_all vocab_only
            embedding_only draft_num_predict
        """,
        "Ollama ignores it too": _AS_OLLAMA,
    },
    refuses=REFUSES,
    refuses_but={name: value for name, value in REFUSES_BUT.items() if name not in _AS_OLLAMA.split()},
)
class OllamaOptions(Struct, kw_only=True):
    num_predict: Annotated[_Whole | None, about("The most tokens to generate; 0 or less: no limit.")] = None
    temperature: Annotated[_Float | None, about("0 or less is greedy (default 1).")] = None
    top_k: Annotated[_Whole | None, about("Samples from this many tokens; 0 or less: from all (the default).")] = None
    top_p: Annotated[_Float | None, about("As in chat completions (default 1); below 0 as 0, above 1 as 1.")] = None
    min_p: Annotated[_Float | None, about("As in chat completions; below 0 as 0, above 1 as 1.")] = None
    seed: Annotated[_Whole | None, about("The same seed gives the same answer; below 0: a random seed.")] = None
    stop: Annotated[ShortText | StopTexts | None, about("Texts that end the answer, which leaves them out.")] = None
    repeat_penalty: Annotated[
        Annotated[float, Meta(ge=0, le=1e6)] | None, about("As `repetition_penalty` in chat completions; 0: none.")
    ] = None
    presence_penalty: Annotated[_Float | None, about("As in chat completions.")] = None
    frequency_penalty: Annotated[_Float | None, about("As in chat completions.")] = None


@unused(ignores={"a prompt that does not fit the context is refused": "truncate shift"})
class OllamaRequest(Struct, kw_only=True):
    model: Annotated[str, about("The name of a model; the tag may be left out.")]
    stream: Annotated[bool | None, about("Whether the answer is streamed, in lines of JSON (default true).")] = None
    format: Annotated[str | dict[str, Any] | None, about("`json` or a JSON schema; it is enforced.")] = None
    options: Annotated[OllamaOptions | None, about("Sampling parameters and limits.")] = None
    think: Annotated[
        bool | Effort | None, about("The reasoning effort; false: low, and the answer leaves the reasoning out.")
    ] = None
    keep_alive: Annotated[
        str | float | None,
        about("A duration such as `5m`, or seconds. A model stays loaded; without input, 0 is answered with `unload`."),
    ] = None
    logprobs: Annotated[bool | None, about("Whether the content's tokens come with log-probabilities.")] = None
    top_logprobs: Annotated[TopLogprobs | None, about("The most likely alternatives per token, with `logprobs`.")] = (
        None
    )


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: Annotated[list[OllamaMessage] | None, about("The conversation; without it, nothing is generated.")] = None
    tools: Annotated[
        Annotated[list[OllamaTool], Meta(max_length=MAX_TOOLS)] | None, about("Functions that the model may call.")
    ] = None


@unused(
    ignores={"images are not generated": "width height steps"},
    refuses="images context",
    refuses_but={"suffix": "", "template": ""},
)
class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: Annotated[str | None, about("The user's message; without it, nothing is generated.")] = None
    system: Annotated[str | None, about("A system message before the prompt.")] = None
    raw: Annotated[bool | None, about("Whether the model continues the prompt, without a chat template.")] = None


@unused(
    ignores={
        "nothing is fetched": "insecure username password",
        "the description of a model is always the same": "system template options verbose",
    }
)
class OllamaModelRequest(Struct, kw_only=True):
    model: Annotated[str | None, about("The name of a model; the tag may be left out.")] = None
    name: Annotated[str | None, about("The older name of `model`.")] = None


class OllamaPullRequest(OllamaModelRequest, kw_only=True):
    stream: Annotated[bool | None, about("Whether the answer is streamed, in lines of JSON (default true).")] = None


class OllamaRecord(Struct, kw_only=True):
    """A part of an answer, or all of it. Durations are in nanoseconds; the last record has them."""

    model: str
    created_at: str
    done: bool = False
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class OllamaAnswerMessage(Struct):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaChatAnswer(OllamaRecord, kw_only=True):
    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaRecord, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaDetails(Struct):
    parameter_size: str
    quantization_level: str = "MXFP4"
    format: str = "safetensors"
    family: str = "gptoss"
    families: tuple[str, ...] = ("gptoss",)
    parent_model: str = ""


class OllamaModelEntry(Struct, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModel(OllamaModelEntry, kw_only=True):
    modified_at: str


class OllamaModels(Struct):
    models: list[OllamaModel]


class OllamaLoadedModel(OllamaModelEntry, kw_only=True):
    size_vram: int
    expires_at: str
    context_length: int


class OllamaLoadedModels(Struct):
    models: list[OllamaLoadedModel]


class OllamaModelInfo(Struct, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


class OllamaStatus(Struct):
    status: str
    digest: str | UnsetType = UNSET  # of a file that is downloaded
    total: int | UnsetType = UNSET  # bytes
    completed: int | UnsetType = UNSET
