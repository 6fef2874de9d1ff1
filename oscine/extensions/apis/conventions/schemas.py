"""The JSON of other servers' endpoints, as msgspec structs."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from oscine.api.serving.parameters import (
    REFUSES,
    REFUSES_BUT,
    Int64,
    Natural,
    Penalty,
    Positive,
    RepetitionPenalty,
    Share,
    ShortText,
    StopTexts,
    Temperature,
    TopK,
    about,
    ignored,
    unused,
)
from oscine.api.serving.schemas import Message

# ---- Triton Inference Server ----

_Word = Annotated[str, Meta(max_length=1024)]
_Words = _Word | Annotated[list[_Word], Meta(max_length=16)]
_BACKENDS = {
    "the model has its own tokens for begin and end": "end_id pad_id",
    "see /v1/completions for log-probabilities": "return_log_probs return_context_logits return_generation_logits",
}
_NOT_DONE = """
    image_input prompt_embedding_table prompt_vocab_size lora_task_id lora_weights lora_config embedding_bias_words
    embedding_bias_weights
"""
_OF_CHAT = " ".join(name for name in REFUSES.split() if name != "bad_words")  # which is a field
_ONLY = {"beam_width": 1, "num_return_sequences": 1, "n": 1}


@unused(ignores=_BACKENDS, refuses=f"{_NOT_DONE} {_OF_CHAT}", refuses_but={**REFUSES_BUT, **_ONLY})
class GenerateParameters(Struct, kw_only=True):
    """As the backends of TensorRT-LLM and vLLM name them."""

    max_tokens: Annotated[Positive | None, about("Tokens to generate at most (default 16).")] = None
    stop_words: Annotated[_Words | None, about("Texts that end the answer, which leaves them out.")] = None
    bad_words: Annotated[_Words | None, about("Not supported: only empty texts are accepted.")] = None
    stop: Annotated[ShortText | StopTexts | None, about("The same as `stop_words`.")] = None
    temperature: Annotated[Temperature | None, about("0 is greedy (default 1).")] = None
    top_p: Annotated[Share | None, about("Share of probability in nucleus sampling (default 1).")] = None
    top_k: Annotated[TopK | None, about("Samples from this many tokens; 0 or -1: from all.")] = None
    min_p: Annotated[Share | None, about("Leaves out tokens below this share of the greatest probability.")] = None
    seed: Annotated[Int64 | None, about("The same seed gives the same answer (default: drawn).")] = None
    random_seed: Annotated[Int64 | None, about("The same as `seed`.")] = None
    min_tokens: Annotated[Natural | None, about("Tokens before which the answer does not end.")] = None
    min_length: Annotated[Natural | None, about("The same as `min_tokens`.")] = None
    repetition_penalty: Annotated[
        RepetitionPenalty | None, about("Above 0; divides positive logits of tokens that occurred.")
    ] = None
    presence_penalty: Annotated[Penalty | None, about("Subtracted once from the logit of a generated token.")] = None
    frequency_penalty: Annotated[Penalty | None, about("Subtracted for each time that a token was generated.")] = None
    ignore_eos: Annotated[bool | None, about("Whether generation goes on after the model's own end.")] = None
    exclude_input_in_output: Annotated[bool | None, about("False puts the prompt before the answer.")] = None


class GenerateRequest(GenerateParameters, kw_only=True):
    text_input: Annotated[str, Meta(min_length=1), about("The text that the model continues.")]
    parameters: Annotated[GenerateParameters | None, about("Parameters; they may also stand beside `text_input`.")] = (
        None
    )
    id: Annotated[str | None, about("Returned with the answer.")] = None
    model: Annotated[str | None, ignored("the path names the model")] = None


class GenerateAnswer(Struct, omit_defaults=True):
    """An answer, or a piece of one."""

    model_name: str
    model_version: str
    text_output: str
    id: str | None = None


# ---- the Open Inference Protocol of KServe ----


class ServerMetadata(Struct):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(Struct):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Struct):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class TensorConfig(Struct):
    name: str
    data_type: str
    dims: list[int]


class DecoupledPolicy(Struct):
    decoupled: bool


class ModelConfig(Struct):
    """As Triton Inference Server writes it."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    input: list[TensorConfig]
    output: list[TensorConfig]
    model_transaction_policy: DecoupledPolicy


class ModelReadiness(Struct):
    name: str
    ready: bool


# ---- SageMaker ----


class Invocation(Struct, kw_only=True):
    """The body of a chat completion, of a completion or of a response: exactly one of the three inputs is given."""

    messages: Annotated[list[Message] | None, about("The body is a chat completion.")] = None
    prompt: Annotated[Any, about("The body is a completion.")] = None
    input: Annotated[Any, about("The body is a response.")] = None
    model: Annotated[str | None, about("The name of a model. A server with one model needs none.")] = None
    stream: Annotated[bool | None, about("Whether the answer comes as events.")] = None


# ---- NIM ----


class NimVersion(Struct):
    release: str
    api: str


class NimLicense(Struct):
    name: str
    path: str
    sha: str  # SHA-1, 40 hexadecimal digits
    size: int  # characters
    url: str
    type: Literal["file"]
    content: str


class NimModel(Struct):
    modelUrl: str
    shortName: str


class NimMetadata(Struct):
    version: str
    assetInfo: list[str]
    licenseInfo: NimLicense
    modelInfo: list[NimModel]
    repository_override: str
    selectedModelProfileId: str


class NimManifest(Struct):
    manifest_file: str  # YAML
    repository_override: str


# ---- vLLM ----


class ServerLoad(Struct):
    server_load: int  # sequences that are admitted and not over


class ServerInfo(Struct):
    version: str
    models: dict[str, dict[str, Any]]  # options of the engine, by the name of the model
    tools: list[dict[str, Any]]  # built-in tools that are enabled, as the `tools` of a response name them


class ModelQuery(Struct):
    model: str | None = None  # a server with one model needs none


class TokenizerInfo(Struct):
    tokenizer_class: str
    bos_token: str
    eos_token: str
    pad_token: str
    vocab_size: int
    model_max_length: int
    chat_template: str | None
