"""Whether each parameter of a request is honoured, ignored or refused. The annotation of its field says which.

The annotation also has the description that /openapi.json shows. Parameters that change nothing here are ignored.
Parameters that would change the answer and are not supported are refused. Names without a field are ignored.
"""

from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, get_type_hints

from msgspec import Meta, Struct

from oscine.api.http.errors import unsupported

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
_REFUSED = "refused"  # key in Meta.extra: the values that are accepted all the same


def about(text: str, **schema: Any) -> Meta:
    """A parameter that is honoured. `schema`: JSON schema that the type does not give, such as bounds."""
    return Meta(description=text, extra_json_schema=schema)


@cache
def bounds_of(kind: type) -> dict[str, tuple[float, float, bool]]:
    """The least and the greatest value of each bounded parameter, and whether the least one itself is refused."""
    found = {}
    for name, meta in _metas(kind):
        schema = meta.extra_json_schema or {}
        if "maximum" in schema:
            is_open = "exclusiveMinimum" in schema
            low: float = schema["exclusiveMinimum" if is_open else "minimum"]
            found[name] = (low, float(schema["maximum"]), is_open)
    return found


def _metas(kind: type) -> Iterator[tuple[str, Meta]]:
    for name, annotated in get_type_hints(kind, include_extras=True).items():
        for meta in getattr(annotated, "__metadata__", ()):
            yield name, meta


def ignored(why: str) -> Meta:
    return Meta(description=f"Taken without effect: {why}.")


def refused(*usual: object) -> Meta:
    """A parameter that would change the answer. `usual`: accepted values, which ask for what is done anyway."""
    schema = {"enum": [None, *usual]} if usual else {"type": "null"}
    what = f"Not supported: anything but {usual[0]!r} is refused." if usual else "Not supported, and refused."
    return Meta(description=what, extra={_REFUSED: usual}, extra_json_schema=schema)


Refused = Annotated[Any, refused()]


@cache
def _refused_by(kind: type) -> tuple[dict[str, tuple[object, ...]], Callable[[Any], tuple[Any, ...]]]:
    """The parameters that a struct refuses with their accepted values, and a function that reads all of them."""
    usual = {name: meta.extra[_REFUSED] for name, meta in _metas(kind) if meta.extra and _REFUSED in meta.extra}
    return usual, attrgetter(*usual) if len(usual) > 1 else lambda request: tuple(getattr(request, n) for n in usual)


def refuse(request: Any) -> None:
    """Raises APIError for the first refused parameter that is given, unless its value is empty, false or accepted."""
    usual, read = _refused_by(request.__class__)
    values = read(request)
    if values.count(None) == len(values):
        return
    for name, value in zip(usual, values, strict=True):
        if value is not None and value is not False and value != [] and value not in usual[name]:
            raise unsupported(name)


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


_ENGINE = "how requests reach an engine is the server's affair"
_MEDIA = "the model reads text alone"


class IgnoredFields(Struct, kw_only=True):
    """Parameters of OpenAI's API, vLLM and SGLang that change no answer here."""

    user: Annotated[Any, ignored("logs and limits go by API key")] = None
    safety_identifier: Annotated[Any, ignored("logs and limits go by API key")] = None
    metadata: Annotated[Any, ignored("nothing is stored")] = None
    store: Annotated[Any, ignored("nothing is stored")] = None
    service_tier: Annotated[Any, ignored("there is one; see `priority`")] = None
    prediction: Annotated[Any, ignored("it changes speed alone")] = None
    prompt_cache_key: Annotated[Any, ignored("prefixes are cached by their tokens; see `cache_salt`")] = None
    prompt_cache_options: Annotated[Any, ignored("prefixes are cached by their tokens")] = None
    prompt_cache_retention: Annotated[Any, ignored("prefixes are cached by their tokens")] = None
    cache_prompt: Annotated[Any, ignored("prefixes are always cached")] = None
    id_slot: Annotated[Any, ignored(_ENGINE)] = None
    keep_alive: Annotated[Any, ignored("a model stays loaded")] = None
    request_id: Annotated[Any, ignored("the header X-Request-Id names a request")] = None
    rid: Annotated[Any, ignored("the header X-Request-Id names a request")] = None
    session_id: Annotated[Any, ignored(_ENGINE)] = None
    kv_transfer_params: Annotated[Any, ignored(_ENGINE)] = None
    ec_transfer_params: Annotated[Any, ignored(_ENGINE)] = None
    bootstrap_host: Annotated[Any, ignored(_ENGINE)] = None
    bootstrap_port: Annotated[Any, ignored(_ENGINE)] = None
    bootstrap_room: Annotated[Any, ignored(_ENGINE)] = None
    data_parallel_rank: Annotated[Any, ignored(_ENGINE)] = None
    routed_dp_rank: Annotated[Any, ignored(_ENGINE)] = None
    disagg_prefill_dp_rank: Annotated[Any, ignored(_ENGINE)] = None
    ngram_corpus_id: Annotated[Any, ignored("it changes speed alone")] = None
    custom_labels: Annotated[Any, ignored("metrics have labels of their own")] = None
    stream_interval: Annotated[Any, ignored("`--stream-interval` is the server's")] = None
    stream_reasoning: Annotated[Any, ignored("all that is generated is streamed")] = None
    add_special_tokens: Annotated[Any, ignored("the model has no token that begins a text")] = None
    skip_special_tokens: Annotated[Any, ignored("special tokens never reach an answer")] = None
    spaces_between_special_tokens: Annotated[Any, ignored("special tokens never reach an answer")] = None
    truncation_side: Annotated[Any, ignored("nothing is truncated")] = None
    return_cached_tokens_details: Annotated[Any, ignored("the usage always has cached tokens")] = None
    return_token_offsets: Annotated[Any, ignored("it is for requests that render a prompt")] = None
    return_mm_kwargs: Annotated[Any, ignored(_MEDIA)] = None
    media_io_kwargs: Annotated[Any, ignored(_MEDIA)] = None
    mm_processor_kwargs: Annotated[Any, ignored(_MEDIA)] = None
    images_config: Annotated[Any, ignored(_MEDIA)] = None
    max_dynamic_patch: Annotated[Any, ignored(_MEDIA)] = None
    min_dynamic_patch: Annotated[Any, ignored(_MEDIA)] = None
    use_audio_in_video: Annotated[Any, ignored(_MEDIA)] = None
    guided_decoding_backend: Annotated[Any, ignored("there is one")] = None


class RefusedFields(IgnoredFields, kw_only=True):
    """Parameters of OpenAI's API, vLLM, SGLang and llama.cpp that would change the answer."""

    moderation: Refused = None
    bad_words: Refused = None
    allowed_token_ids: Refused = None
    logit_processors: Refused = None
    logits_processors: Refused = None
    custom_logit_processor: Refused = None
    custom_params: Refused = None
    vllm_xargs: Refused = None
    watermarking: Refused = None
    prompt_logprobs: Refused = None
    logprob_token_ids: Refused = None
    return_tokens_as_token_ids: Refused = None
    return_prompt_text: Refused = None
    return_prompt_token_ids: Refused = None
    return_hidden_states: Refused = None
    return_routed_experts: Refused = None
    routed_experts_start_len: Annotated[Any, refused(0)] = None
    routed_experts_prompt_start: Annotated[Any, refused(0)] = None
    return_meta_info: Refused = None
    truncate_prompt_tokens: Refused = None
    include_stop_str_in_output: Refused = None
    no_stop_trim: Refused = None
    stop_regex: Refused = None
    repetition_detection: Refused = None
    use_beam_search: Refused = None
    length_penalty: Annotated[Any, refused(1.0)] = None
    early_stopping: Refused = None
    best_of: Annotated[Any, refused(1)] = None
    typical_p: Annotated[Any, refused(1.0)] = None
    top_a: Annotated[Any, refused(0.0)] = None
    tfs: Annotated[Any, refused(1.0)] = None
    tfs_z: Annotated[Any, refused(1.0)] = None
    top_n_sigma: Annotated[Any, refused(-1.0)] = None
    mirostat: Annotated[Any, refused(0)] = None
    dynatemp_range: Annotated[Any, refused(0.0)] = None
    dry_multiplier: Annotated[Any, refused(0.0)] = None
    xtc_probability: Annotated[Any, refused(0.0)] = None
    min_keep: Annotated[Any, refused(0)] = None
    samplers: Refused = None
    structural_tag: Refused = None
    guided_whitespace_pattern: Refused = None
    lora_path: Refused = None
    lora_request: Refused = None
    session_params: Refused = None
    extra_key: Refused = None


class SamplingFields(RefusedFields, kw_only=True):
    """Parameters shared by chat and text completions and responses. None means not given, as clients send null."""

    model: Annotated[str | None, about("The name of a model. A server with one model needs none.")] = None
    stream: Annotated[bool | None, about("Whether the answer comes as events.")] = None
    stream_options: Annotated[StreamOptions | None, about("For streamed answers alone.")] = None
    n: Annotated[int | None, about("How many answers are generated.", minimum=1, maximum=MAX_CHOICES)] = None
    max_tokens: Annotated[int | None, about("Tokens that are generated at most, reasoning included.")] = None
    temperature: Annotated[float | None, about("0 is greedy (default 1).", minimum=0, maximum=2)] = None
    top_p: Annotated[
        float | None,
        about("Samples from the fewest tokens with this probability; 0 is greedy (default 1).", minimum=0, maximum=1),
    ] = None
    presence_penalty: Annotated[
        float | None, about("Subtracted once from the logit of a generated token.", minimum=-2, maximum=2)
    ] = None
    frequency_penalty: Annotated[
        float | None, about("Subtracted for each time that a token was generated.", minimum=-2, maximum=2)
    ] = None
    logit_bias: Annotated[dict[int, float] | None, about("Token ids, and what is added to their logits.")] = None
    seed: Annotated[int | None, about("The same seed gives the same answer (default: drawn).")] = None
    stop: Annotated[str | list[str] | None, about("Up to 16 texts that end the answer and are left out of it.")] = None
    # Extensions with vLLM's names:
    top_k: Annotated[int | None, about("Samples from this many tokens; 0 or -1: from all.", minimum=-1)] = None
    min_p: Annotated[
        float | None, about("Leaves out tokens below this share of the greatest probability.", minimum=0, maximum=1)
    ] = None
    repetition_penalty: Annotated[
        float | None, about("Divides positive logits of tokens that occurred.", exclusiveMinimum=0, maximum=100)
    ] = None
    min_tokens: Annotated[int | None, about("Tokens before which the answer does not end.", minimum=0)] = None
    ignore_eos: Annotated[bool | None, about("Whether the model's own end is passed over.")] = None
    stop_token_ids: Annotated[list[int] | None, about("Tokens that end the answer as well.")] = None
    priority: Annotated[int | None, about("Lower runs sooner (default 0).")] = None
    cache_salt: Annotated[str | None, about("Cached prefixes are shared within one salt alone.")] = None
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
