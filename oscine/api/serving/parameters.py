"""Whether each parameter of a request is honoured, ignored or refused, and the bounds of its value.

A field's annotation says so, and has the description that /openapi.json shows. Parameters that change nothing here are
ignored. Parameters that would change the answer and are not supported are refused. Names without a field are ignored.
"""

from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_type_hints

from msgspec import Meta, Struct, defstruct

from oscine.api.common.errors import unsupported

MAX_TOOLS = 1024
_MAX_TOKEN_IDS = 1024
_REFUSED = "refused"  # key in Meta.extra: the values that are accepted all the same
_NONE: Mapping[str, Any] = MappingProxyType({})

S = TypeVar("S", bound=Struct)

Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LEAST_REPETITION = 1e-30  # of the engine: logits divided by less overflow
RepetitionPenalty = Annotated[float, Meta(ge=LEAST_REPETITION, le=100)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopK = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Int32 = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
TokenIds = Annotated[list[Natural], Meta(max_length=_MAX_TOKEN_IDS)]
ShortText = Annotated[str, Meta(min_length=1, max_length=1024)]
StopTexts = Annotated[list[ShortText], Meta(max_length=16)]
LogitBias = Annotated[dict[Natural, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=_MAX_TOKEN_IDS)]


def about(text: str, **schema: Any) -> Meta:
    """A parameter that is honoured. `schema`: JSON schema that the type does not give."""
    return Meta(description=text, extra_json_schema=schema)


def ignored(why: str) -> Meta:
    return Meta(description=f"Taken without effect: {why}.")


def _refused(*usual: object) -> Meta:
    """A parameter that would change the answer. `usual`: accepted values, which ask for what is done anyway."""
    nothing: tuple[object, ...] = (False, [])  # as `refuse` has it
    schema = {"enum": [None, *usual, *(value for value in nothing if value not in usual)]}
    what = f"Not supported: anything but {usual[0]!r} is refused." if usual else "Not supported, and refused."
    return Meta(description=what, extra={_REFUSED: usual}, extra_json_schema=schema)


Refused = Annotated[Any, _refused()]


def unused(
    *, ignores: Mapping[str, str] = _NONE, refuses: str = "", refuses_but: Mapping[str, object] = _NONE
) -> Callable[[type[S]], type[S]]:
    """Adds parameters without a use to a struct.

    `ignores`: names of ignored ones, by the reason. `refuses`: names of refused ones. `refuses_but`: refused ones with
    the value that is accepted.
    """
    metas = {name: ignored(why) for why, names in ignores.items() for name in names.split()}
    metas |= {name: _refused() for name in refuses.split()}
    metas |= {name: _refused(value) for name, value in refuses_but.items()}
    return _with_fields({name: Annotated[Any, meta] for name, meta in metas.items()})


def shares(names: str) -> Callable[[type[S]], type[S]]:
    """Adds parameters of SamplingFields to a struct: those with these names."""
    hints = get_type_hints(SamplingFields, include_extras=True)
    return _with_fields({name: hints[name] for name in names.split()})


def _with_fields(hints: Mapping[str, Any]) -> Callable[[type[S]], type[S]]:
    fields = [(name, hint, None) for name, hint in hints.items()]

    def add(kind: type[S]) -> type[S]:
        named = {"__doc__": kind.__doc__}
        return defstruct(kind.__name__, fields, bases=(kind,), namespace=named, module=kind.__module__, kw_only=True)  # type: ignore[return-value]

    return add


@cache
def _refused_by(kind: type) -> tuple[dict[str, tuple[object, ...]], Callable[[Any], tuple[Any, ...]]]:
    """The parameters that a struct refuses with their accepted values, and a function that reads all of them."""
    hints = get_type_hints(kind, include_extras=True).items()
    metas = [(name, meta) for name, hint in hints for meta in getattr(hint, "__metadata__", ())]
    usual = {name: meta.extra[_REFUSED] for name, meta in metas if meta.extra and _REFUSED in meta.extra}
    return usual, attrgetter(*usual) if len(usual) > 1 else lambda request: tuple(getattr(request, n) for n in usual)


def refuse(request: Any, where: str = "") -> None:
    """Raises APIError for the first refused parameter that is given, unless its value is empty, false or accepted.

    `where`: what stands before its name in its path.
    """
    usual, read = _refused_by(request.__class__)
    values = read(request)
    if values.count(None) == len(values):
        return
    for name, value in zip(usual, values, strict=True):
        if value is not None and value is not False and value != [] and value not in usual[name]:
            raise unsupported(where + name)


class StructuredOutputs(Struct):
    """vLLM's parameter of this name: exactly one field is given."""

    json: Annotated[dict[str, Any] | str | None, about("A JSON schema, as an object or as text.")] = None
    regex: Annotated[str | None, about("A regular expression of the whole text.")] = None
    choice: Annotated[list[str] | None, about("The texts that are possible.")] = None
    grammar: Annotated[str | None, about("A grammar: Lark, or GBNF with a rule `root`.")] = None
    json_object: Annotated[bool | None, about("Any JSON object.")] = None
    structural_tag: Refused = None


class StreamOptions(Struct):
    include_usage: Annotated[bool | None, about("Whether the last event has the usage.")] = None


_ENGINE = "how requests reach an engine is up to the server"
_MEDIA = "the model reads text alone"
_IGNORED = {
    "logs and limits go by API key": "user safety_identifier",
    "nothing is stored": "metadata store",
    "there is only one; see `priority`": "service_tier",
    "it changes speed alone": "prediction ngram_corpus_id",
    "prefixes are cached by their tokens; see `cache_salt`": "prompt_cache_key",
    "prefixes are cached by their tokens": "prompt_cache_options prompt_cache_retention",
    "prefixes are always cached": "cache_prompt",
    "a model stays loaded": "keep_alive",
    "the header X-Request-Id names a request": "request_id rid",
    _ENGINE: """
        id_slot session_id kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port bootstrap_room
        data_parallel_rank routed_dp_rank disagg_prefill_dp_rank
    """,
    "metrics have labels of their own": "custom_labels",
    "`--stream-interval` is the server's": "stream_interval",
    "all that is generated is streamed": "stream_reasoning",
    "the model has no token that begins a text": "add_special_tokens",
    "special tokens never reach an answer": "skip_special_tokens spaces_between_special_tokens",
    "nothing is truncated": "truncation_side",
    "the usage always has cached tokens": "return_cached_tokens_details",
    "it is for requests that render a prompt": "return_token_offsets",
    _MEDIA: """
        return_mm_kwargs media_io_kwargs mm_processor_kwargs images_config max_dynamic_patch min_dynamic_patch
        use_audio_in_video
    """,
    "there is only one": "guided_decoding_backend",
}
REFUSES = """
    moderation bad_words allowed_token_ids logit_processors logits_processors custom_logit_processor custom_params
    vllm_xargs watermarking prompt_logprobs logprob_token_ids return_tokens_as_token_ids return_prompt_text
    return_prompt_token_ids return_hidden_states return_routed_experts return_meta_info truncate_prompt_tokens
    include_stop_str_in_output no_stop_trim stop_regex repetition_detection use_beam_search early_stopping samplers
    structural_tag guided_whitespace_pattern lora_path lora_request session_params extra_key
"""
REFUSES_BUT = {
    **dict.fromkeys(("routed_experts_start_len", "routed_experts_prompt_start", "mirostat", "min_keep"), 0),
    **dict.fromkeys(("top_a", "dynatemp_range", "dry_multiplier", "xtc_probability"), 0.0),
    **dict.fromkeys(("length_penalty", "typical_p", "tfs", "tfs_z"), 1.0),
    "top_n_sigma": -1.0,
    "best_of": 1,
}


@unused(ignores=_IGNORED, refuses=REFUSES, refuses_but=REFUSES_BUT)
class SamplingFields(Struct, kw_only=True):
    """Parameters shared by chat and text completions and responses. None means not given, as clients send null."""

    model: Annotated[str | None, about("The name of a model. A server with one model needs none.")] = None
    stream: Annotated[bool | None, about("Whether the answer comes as events.")] = None
    stream_options: Annotated[StreamOptions | None, about("For streamed answers alone.")] = None
    n: Annotated[Annotated[int, Meta(ge=1, le=128)] | None, about("How many answers are generated.")] = None
    max_tokens: Annotated[int | None, about("Tokens that are generated at most, reasoning included.")] = None
    temperature: Annotated[Temperature | None, about("0 is greedy (default 1).")] = None
    top_p: Annotated[Share | None, about("Share of probability in nucleus sampling (default 1); 0 is greedy.")] = None
    presence_penalty: Annotated[Penalty | None, about("Subtracted once from the logit of a generated token.")] = None
    frequency_penalty: Annotated[Penalty | None, about("Subtracted for each time that a token was generated.")] = None
    logit_bias: Annotated[LogitBias | None, about("Token ids, and what is added to their logits.")] = None
    seed: Annotated[Int64 | None, about("The same seed gives the same answer (default: drawn).")] = None
    stop: Annotated[ShortText | StopTexts | None, about("Up to 16 texts that end the answer; left out of it.")] = None
    # Extensions with vLLM's names:
    top_k: Annotated[TopK | None, about("Samples from this many tokens; 0 or -1: from all.")] = None
    min_p: Annotated[Share | None, about("Leaves out tokens below this share of the greatest probability.")] = None
    repetition_penalty: Annotated[
        RepetitionPenalty | None, about("Above 0; divides positive logits of tokens that occurred.")
    ] = None
    min_tokens: Annotated[Natural | None, about("Tokens before which the answer does not end.")] = None
    ignore_eos: Annotated[bool | None, about("Whether generation goes on after the model's own end.")] = None
    stop_token_ids: Annotated[TokenIds | None, about("Tokens that end the answer as well.")] = None
    priority: Annotated[Int32 | None, about("Lower runs sooner (default 0).")] = None
    cache_salt: Annotated[ShortText | None, about("Cached prefixes are shared by requests with the same salt.")] = None
    guided_json: Annotated[dict[str, Any] | str | None, about("A JSON schema that the answer satisfies.")] = None
    guided_regex: Annotated[str | None, about("A regular expression of the whole answer.")] = None
    guided_choice: Annotated[list[str] | None, about("The answers that are possible.")] = None
    guided_grammar: Annotated[str | None, about("A grammar: Lark, or GBNF with a rule `root`.")] = None
    structured_outputs: Annotated[StructuredOutputs | None, about("The form of the answer, as vLLM has it.")] = None
    # Extensions with names of SGLang and llama.cpp:
    json_schema: Annotated[dict[str, Any] | str | None, about("The same as `guided_json`.")] = None
    regex: Annotated[str | None, about("The same as `guided_regex`.")] = None
    ebnf: Annotated[str | None, about("The same as `guided_grammar`.")] = None
    grammar: Annotated[str | None, about("The same as `guided_grammar`.")] = None
