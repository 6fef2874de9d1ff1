"""The configuration of a gpt-oss model from the metadata of its GGUF file, as llama.cpp or Ollama write it.

What the metadata do not say is the same in all such files: SwiGLU's limit and the biases.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscine.extensions.formats.gguf.file import Gguf, Texts
from oscine.model.config import MAX_LAYERS, ModelConfig, gpt_oss_20b
from oscine.model.o200k import NUM_TOKENS, SPECIAL_IDS, o200k_folder
from oscine.system.model_files import shown

ARCHITECTURES = ("gpt-oss", "gptoss")  # the latter in the first files of Ollama
TOKENS = "tokenizer.ggml.tokens"
_PUBLISHED = gpt_oss_20b()
_INTEGERS = {  # field of config.json -> key, without the architecture
    "hidden_size": "embedding_length",
    "head_dim": "attention.key_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_hidden_layers": "block_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "sliding_window": "attention.sliding_window",
    "max_position_embeddings": "context_length",
}


def config_of(file: Gguf) -> ModelConfig:
    """Raises ValueError naming the file and the key that is missing, of a wrong type, or not supported."""
    try:
        return ModelConfig.from_dict(_as_json(file.metadata))
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from None


def tokenizer_of(file: Gguf) -> Path:
    """A folder with tokenizer.json: that of the file, or gpt-oss's own. Raises ValueError for another vocabulary."""
    folder = file.path.parent
    if (folder / "tokenizer.json").is_file():
        return folder
    vocabulary = file.metadata.get(TOKENS)
    tokens = list(vocabulary) if isinstance(vocabulary, Texts) and len(vocabulary) == NUM_TOKENS else []
    if not tokens or any(tokens[number] != token for token, number in SPECIAL_IDS.items()):
        raise ValueError(
            f"{file.path}: its vocabulary is not gpt-oss's (o200k_harmony), and no tokenizer.json is beside it; "
            "--tokenizer names a folder that has one"
        )
    return o200k_folder()


def _as_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The same configuration as config.json has it."""
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"general.architecture must be gpt-oss, not {shown(repr(architecture))}")
    own = _Section(metadata, f"{architecture}.")
    values: dict[str, Any] = {field: own.integer(key) for field, key in _INTEGERS.items()}
    vocabulary = metadata.get(TOKENS)
    if not isinstance(vocabulary, Texts):
        raise ValueError(f"{TOKENS} is missing, or no list of strings")
    for key, value in (
        ("vocab_size", len(vocabulary)),
        ("attention.value_length", values["head_dim"]),
        ("rope.dimension_count", values["head_dim"]),
        ("rope.scaling.type", "yarn"),
    ):
        own.check(key, value)
    per_expert = "expert_feed_forward_length"
    return values | {
        "model_type": "gpt_oss",
        "quantization_config": {"quant_method": "mxfp4"},
        "vocab_size": len(vocabulary),
        "intermediate_size": own.integer(per_expert if own.has(per_expert) else "feed_forward_length"),
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
        "swiglu_limit": _PUBLISHED.swiglu_limit,
        "layer_types": _layer_types(own, values["num_hidden_layers"]),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_ids", metadata.get("tokenizer.ggml.eos_token_id")),
        "rope_theta": own.number("rope.freq_base"),
        "rope_scaling": {
            "rope_type": "yarn",
            "truncate": False,
            "factor": own.number("rope.scaling.factor"),
            "beta_fast": own.number("rope.scaling.yarn_beta_fast", _PUBLISHED.yarn.beta_fast),
            "beta_slow": own.number("rope.scaling.yarn_beta_slow", _PUBLISHED.yarn.beta_slow),
            "original_max_position_embeddings": own.integer("rope.scaling.original_context_length"),
        },
    }


def _layer_types(own: "_Section", num_layers: int) -> list[str] | None:
    """The type of each layer, if the file has a pattern, which llama.cpp reads too.

    None: every second layer has full attention, as in all files so far.
    """
    key = "attention.sliding_window_pattern"
    if not own.has(key):
        return None
    pattern = own.values[own.prefix + key]
    if not isinstance(pattern, list):
        period = own.integer(key)
        known = range(min(num_layers, MAX_LAYERS))  # ModelConfig refuses more
        pattern = [period == 0 or i % period < period - 1 for i in known]
    return ["sliding_attention" if sliding else "full_attention" for sliding in pattern]


@dataclass(frozen=True, slots=True)
class _Section:
    """The values whose keys begin with the architecture. Raises ValueError naming the key."""

    values: Mapping[str, Any]
    prefix: str

    def has(self, key: str) -> bool:
        return self.prefix + key in self.values

    def integer(self, key: str) -> int:
        return int(self._typed(key, int, "an integer"))

    def number(self, key: str, default: float | None = None) -> float:
        if default is not None and not self.has(key):
            return default
        return float(self._typed(key, (int, float), "a number"))

    def check(self, key: str, expected: object) -> None:
        """Checks the value of a key that may be missing."""
        value = self.values.get(self.prefix + key, expected)
        if value != expected:
            raise ValueError(f"{self.prefix}{key} must be {expected!r}, not {shown(repr(value))}")

    def _typed(self, key: str, kind: Any, what: str) -> Any:
        if not self.has(key):
            raise ValueError(f"{self.prefix}{key} is missing")
        value = self.values[self.prefix + key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{self.prefix}{key} must be {what}, not {shown(repr(value))}")
        return value
