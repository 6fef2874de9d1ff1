"""`--speculative-config`: a method, or TensorRT-LLM's or vLLM's mapping, as our SpeculationOptions."""

from collections.abc import Mapping
from typing import Any

from oscine.settings.config import SPECULATION_METHODS, SpeculationOptions
from oscine.settings.name import Values, note
from oscine.settings.option import FileKeyError, OptionError, did_you_mean, either, options_of
from oscine.system.yaml_text import parse_yaml

_NAME = "speculative-config"

_FIELDS = {declared.field: declared for declared in options_of(SpeculationOptions)}
# Keys of TensorRT-LLM and of vLLM -> the field.
_KEYS = {
    "method": "method",
    "decoding_type": "method",
    "num_speculative_tokens": "max_drafts",
    "max_draft_len": "max_drafts",
    "max_drafts": "max_drafts",
    "model": "model",
    "speculative_model": "model",
    "speculative_model_dir": "model",
    "prompt_lookup_max": "lookup_max",
    "max_matching_ngram_size": "lookup_max",
    "prompt_lookup_min": "lookup_min",
}
_METHODS = {"eagle": "eagle3", "eagle3": "eagle3", "ngram": "ngram", "auto": "auto", "none": "none"}  # in lower case

_IGNORED = {
    "the configuration of the head says it": (
        "eagle3_layers_to_capture eagle3_one_model num_eagle_layers max_model_len quantization eagle3_model_arch"
    ),
    "a head on the hub is its latest version; for another one, give a folder": "revision code_revision",
    "the number of drafts follows from measured times": (
        "max_concurrency disable_by_batch_size draft_len_schedule num_speculative_tokens_per_batch_size "
        "acceptance_window acceptance_length_threshold"
    ),
    "drafts never change an answer": (
        "greedy_sampling posterior_threshold posterior_alpha rejection_sample_method acceptance_method "
        "allow_advanced_sampling use_relaxed_acceptance_for_thinking relaxed_topk relaxed_delta disable_logprobs"
    ),
    "drafts are one sequence, no tree": (
        "eagle_choices use_dynamic_tree dynamic_tree_max_topK max_total_draft_tokens max_non_leaves_per_layer "
        "speculative_token_tree"
    ),
    "prompt lookup takes the latest of the longest matches": "is_keep_all is_use_oldest is_public_pool",
    "every rank drafts": "draft_tensor_parallel_size",
    "Oscine has code of its own": (
        "enforce_eager load_format disable_padded_drafter_batch parallel_drafting use_local_argmax_reduction "
        "use_heterogeneous_vocab"
    ),
}
_WITHOUT_EFFECT = {key: why for why, keys in _IGNORED.items() for key in keys.split()}
_OF_LOOKUP = {key: "it is for ngram, not eagle3" for key, name in _KEYS.items() if name in ("lookup_min", "lookup_max")}


def read_speculative_config(value: Any) -> Values:
    """`speculation` of EngineOptions, and a note for each key that has no effect. null leaves the default."""
    given = _parse(value)
    if given is None:
        return {}
    try:
        read = SpeculationOptions(**_fields(given))
    except ValueError as error:
        raise OptionError(_NAME, f"is refused: {error}") from None
    without_effect = _WITHOUT_EFFECT | (_OF_LOOKUP if read.method == "eagle3" else {})
    ignored = (key for key in given if key in without_effect)
    return {_NAME: read} | note(*(f"speculative_config.{key} has no effect: {without_effect[key]}" for key in ignored))


def _parse(value: Any) -> Mapping[str, Any] | None:
    try:
        given = parse_yaml(value) if isinstance(value, str) else value
    except ValueError as error:
        raise OptionError(_NAME, f"is neither JSON nor YAML: {error}") from None
    if isinstance(given, str):
        return {"method": given}
    if given is not None and not isinstance(given, dict):
        raise OptionError(_NAME, f"must be {either(SPECULATION_METHODS)}, or a mapping, not {value!r}")
    return given


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ValueError that names the key."""
    fields: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in given.items():
        if key in _WITHOUT_EFFECT or (value is None and key in _KEYS):
            continue
        if key not in _KEYS:
            raise ValueError(f"unknown key {key!r}{did_you_mean(str(key), _KEYS)}")
        name = _KEYS[key]
        if name in keys:
            raise ValueError(f"{keys[name]} and {key} say the same")
        keys[name] = key
        fields[name] = _read(key, name, value)
    return fields if fields.get("method", "auto") != "auto" else fields | {"method": _method(fields)}


def _read(key: str, name: str, value: Any) -> Any:
    if name == "method":
        if str(value).lower() not in _METHODS:
            raise FileKeyError(key, f"must be {either(('eagle3', 'ngram', 'auto', 'none'))}, not {value!r}")
        return _METHODS[str(value).lower()]
    try:
        return _FIELDS[name].read(value)
    except OptionError as error:
        raise FileKeyError(key, error.rule) from None


def _method(fields: Mapping[str, Any]) -> str:
    """What other keys imply."""
    if "model" in fields:
        return "eagle3"
    return "ngram" if "lookup_max" in fields or "lookup_min" in fields else "auto"
