"""The shape of a gpt-oss model, read from config.json in the spelling of transformers 4 or 5."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from oscine.kv_dtype import KVDtype
from oscine.kv_group import KVGroup, heads_of_rank
from oscine.system.model_files import read_json, shown

MODEL_TYPES = ("gpt_oss", "gpt_oss_puzzle")  # in config.json; in the latter, layers differ from each other
_CLASSIFIERS = ("openai_privacy_filter",)  # of the same family
_ALIASES = {"num_experts_per_tok": ("experts_per_token",)}  # other spellings in the file
_OTHER_DEFAULTS = {"num_hidden_layers": 36}  # of transformers, where ours are those of 20b
MAX_LAYERS = 4096  # each takes memory before the first tensor is looked for
LayerType = Literal["sliding_attention", "full_attention"]
Made = TypeVar("Made")


def read_config(path: Path, make: Callable[[dict[str, Any]], Made]) -> Made:
    """What `make` makes of a config.json. Raises ValueError naming the file and what is wrong in it."""
    values = read_json(path)
    try:
        return make(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """Rotary embedding with YaRN; fields are named as in config.json. Ramp bounds are never rounded."""

    rope_theta: float = 150000.0
    factor: float = 32.0
    beta_fast: float = 32.0  # rotations within the original context above which a dimension is left as it is
    beta_slow: float = 1.0  # rotations below which a dimension is interpolated by factor
    original_max_position_embeddings: int = 4096  # tokens


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a gpt-oss model; the published 20b by default."""

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    head_dim: int = 64
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    num_hidden_layers: int = 24
    num_local_experts: int | tuple[int, ...] = 32  # of all layers, or of each
    num_experts_per_tok: int = 4
    # Tokens, the query's own included; of all layers, or of each. Only sliding layers have one.
    sliding_window: int | tuple[int | None, ...] = 128
    layer_types: tuple[LayerType, ...] = ("sliding_attention", "full_attention") * 12
    rms_norm_eps: float = 1e-5
    swiglu_limit: float = 7.0
    max_position_embeddings: int = 131072  # tokens
    eos_token_ids: tuple[int, ...] = (200002,)  # as in the file, for other programs; here harmony's tokens end a turn
    yarn: YarnConfig = YarnConfig()
    tie_word_embeddings: bool = field(default=False, repr=False)  # the file may have the embedding alone, for the head

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) in (int, float):
                require(0 < value < math.inf, name, "positive and finite", value)
        require(self.head_dim % 2 == 0, "head_dim", "even", self.head_dim)
        for name in ("hidden_size", "intermediate_size"):
            require(getattr(self, name) % 32 == 0, name, "a multiple of 32 (an MXFP4 block)", getattr(self, name))
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        require(heads % kv_heads == 0, "num_attention_heads", f"a multiple of num_key_value_heads ({kv_heads})", heads)
        self._check_layers()
        experts, chosen = min(self.experts), self.num_experts_per_tok
        require(chosen <= experts, "num_experts_per_tok", f"at most num_local_experts ({experts})", chosen)
        require(
            all(0 <= i < self.vocab_size for i in self.eos_token_ids), "eos_token_id", "a token", self.eos_token_ids
        )

    def _check_layers(self) -> None:
        layers = self.num_hidden_layers
        for name in ("layer_types", "num_local_experts", "sliding_window"):
            value = getattr(self, name)
            whole = not isinstance(value, tuple) or len(value) == layers
            require(whole, name, f"{layers} values, one per layer", value)
        for kind in self.layer_types:
            known = kind in ("sliding_attention", "full_attention")
            require(known, "layer_types", "sliding_attention or full_attention", kind)
        require("full_attention" in self.layer_types, "layer_types", "full_attention in some layer", self.layer_types)
        for kind, window in zip(self.layer_types, _per_layer(self.sliding_window, layers), strict=True):
            valid = kind == "full_attention" or (type(window) is int and window > 0)
            require(valid, "sliding_window", "a positive integer in a sliding layer", window)
        for experts in self.experts:
            require(type(experts) is int and experts > 0, "num_local_experts", "positive integers", experts)

    def check_divisible(self, num_ranks: int) -> None:
        """Raises ValueError if tensor parallelism cannot divide the model among so many ranks."""
        for name in ("num_attention_heads", "vocab_size"):
            if (count := getattr(self, name)) % num_ranks:
                raise ValueError(f"{num_ranks} ranks cannot divide a {name} of {count}")
        heads_of_rank(self.num_key_value_heads, num_ranks, 0)

    # ---- per layer ----

    @property
    def experts(self) -> tuple[int, ...]:
        """The number of experts of each layer."""
        return _per_layer(self.num_local_experts, self.num_hidden_layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer in tokens; None is full attention."""
        windows = _per_layer(self.sliding_window, self.num_hidden_layers)
        pairs = zip(self.layer_types, windows, strict=True)
        return tuple(None if kind == "full_attention" else window for kind, window in pairs)

    @property
    def layers_by_window(self) -> dict[int | None, tuple[int, ...]]:
        """Full attention first, then by falling window. The layers with one window have pages of their own."""
        windows = sorted(set(self.windows), key=lambda window: -(window or math.inf))
        return {window: tuple(i for i, own in enumerate(self.windows) if own == window) for window in windows}

    def kv_groups(self, page_size: int, dtype: KVDtype | str, num_ranks: int = 1) -> tuple[KVGroup, ...]:
        """Where all layers keep keys and values, in the order of layers_by_window.

        `page_size`: tokens. `dtype`: a KVDtype, or its value; raises ValueError for others. `num_ranks`:
        tensor-parallel size, over which this whole model is divided.
        """
        shape = self.num_key_value_heads, page_size, self.head_dim
        return tuple(
            KVGroup(window, layers, *shape, KVDtype(dtype), num_ranks)
            for window, layers in self.layers_by_window.items()
        )

    def of_layers(self, layers: Sequence[int]) -> "ModelConfig":
        """A model of these layers only."""
        return replace(
            self,
            num_hidden_layers=len(layers),
            layer_types=tuple(self.layer_types[i] for i in layers),
            sliding_window=tuple(self.windows[i] for i in layers),
            num_local_experts=tuple(self.experts[i] for i in layers),
        )

    @classmethod
    def from_file(cls, path: Path) -> "ModelConfig":
        """Reads a config.json. Raises ValueError naming the file and what is wrong in it."""
        return read_config(path, cls.from_dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """Raises ValueError naming the first field that is of a wrong type or not supported.

        A field that is absent or null has the default of transformers' GptOssConfig. Fields that do not change the
        arithmetic (dropout, initialisers, versions, dtype) are not looked at.
        """
        _check_supported(values)
        values = _flat(values)
        read: dict[Any, Callable[..., Any]] = {int: _integer, float: _number}
        numbers = {
            own.name: read[own.type](
                values, own.name, *_ALIASES.get(own.name, ()), default=_OTHER_DEFAULTS.get(own.name, own.default)
            )
            for own in fields(cls)
            if own.type in read
        }
        layers = numbers["num_hidden_layers"]
        layer_types = _layer_types(values, layers)  # checks their number
        return cls(
            **numbers,
            num_local_experts=_of_layers(values, "num_local_experts", "num_experts", default=128),
            sliding_window=_windows(values, layers),
            layer_types=layer_types,
            eos_token_ids=_token_ids(values, "eos_token_id"),
            yarn=_yarn(values, numbers["max_position_embeddings"]),
            tie_word_embeddings=values.get("tie_word_embeddings") is True,
        )

    def to_dict(self) -> dict[str, Any]:
        """The config.json of this model as published; from_dict reads it back."""
        values = asdict(self)
        yarn, eos = values.pop("yarn"), values.pop("eos_token_ids")
        return {
            **{name: list(value) if isinstance(value, tuple) else value for name, value in values.items()},
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else [*eos],
            "rope_theta": yarn.pop("rope_theta"),
            "rope_scaling": {"rope_type": "yarn", "truncate": False, **yarn},
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            },
        }


def gpt_oss_20b() -> ModelConfig:
    return ModelConfig()


def gpt_oss_120b() -> ModelConfig:
    return ModelConfig(
        num_hidden_layers=36, num_local_experts=128, layer_types=("sliding_attention", "full_attention") * 18
    )


def require(condition: bool, name: str, rule: str, value: object) -> None:
    """Raises ValueError for the value of a field, which the message names."""
    if not condition:
        raise ValueError(f"{name} must be {rule}, not {shown(repr(value))}")


def _check_supported(values: Mapping[str, Any]) -> None:
    """Refuses valid gpt-oss configurations that this implementation does not compute."""
    heads = values.get("architectures")
    classifies = isinstance(heads, list) and any(str(head).endswith("Classification") for head in heads)
    if classifies or values.get("model_type") in _CLASSIFIERS:
        raise ValueError("a classifier: it labels tokens and generates none, so use a pipeline of transformers for it")
    only: dict[str, tuple[object, ...]] = {
        "model_type": MODEL_TYPES,
        "hidden_act": ("silu",),
        "attention_bias": (True,),
        "tie_word_embeddings": (False, True),
        "swiglu_alpha": (1.702,),
    }
    for name, allowed in only.items():
        require(values.get(name) in (None, *allowed), name, repr(allowed[0]), values.get(name))


def _flat(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A gpt_oss_puzzle configuration in the spelling of gpt_oss: its layers are objects, and YaRN has its own name."""
    blocks = values.get("block_configs")
    if blocks is None:
        return values
    whole = isinstance(blocks, list) and all(isinstance(block, dict) for block in blocks)
    require(whole, "block_configs", "a list of objects, one per layer", blocks)
    windows = [block.get("sliding_window") for block in blocks]
    return {
        "rope_scaling": values.get("yarn_rope_scaling"),
        **{name: value for name, value in values.items() if value is not None},
        "num_local_experts": [block.get("num_local_experts") for block in blocks],
        "sliding_window": windows,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
    }


def _find(values: Mapping[str, Any], *names: str, default: Any = None, where: str = "") -> tuple[str, Any]:
    """The value under the first of several spellings; two spellings that disagree are an error.

    `where`: the way to `values`, as messages name it. Without a default, raises ValueError for a missing field.
    """
    found = [(where + name, values[name]) for name in names if values.get(name) is not None]
    if not found and default is None:
        raise ValueError(f"{where}{names[0]} is missing")
    for name, value in found[1:]:
        require(value == found[0][1], name, f"equal to {found[0][0]} ({shown(repr(found[0][1]))})", value)
    return found[0] if found else (where + names[0], default)


def _integer(values: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    name, value = _find(values, *names, default=default)
    require(isinstance(value, int) and not isinstance(value, bool), name, "an integer", value)
    return int(value)


def _number(values: Mapping[str, Any], name: str, *, default: float | None = None, where: str = "") -> float:
    name, value = _find(values, name, default=default, where=where)
    require(isinstance(value, int | float) and not isinstance(value, bool), name, "a number", value)
    require(abs(value) <= sys.float_info.max, name, "finite", value)
    return float(value)


def _of_layers(values: Mapping[str, Any], *names: str, default: int) -> Any:
    """An integer for all layers, or a value for each; which values is checked where their meaning is known."""
    _, value = _find(values, *names, default=default)
    return tuple(value) if isinstance(value, list) else _integer(values, *names, default=default)


def _windows(values: Mapping[str, Any], num_layers: int) -> Any:
    """As _of_layers. Here null is a value: no layer has a window."""
    if values.get("sliding_window", ...) is None:
        return (None,) * num_layers
    return _of_layers(values, "sliding_window", default=128)


def _per_layer(value: Any, num_layers: int) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,) * num_layers


def _token_ids(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = values.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    require(all(type(i) is int for i in ids), name, "an integer or a list of integers", value)
    return tuple(ids)


def _layer_types(values: Mapping[str, Any], num_layers: int) -> tuple[LayerType, ...]:
    """The type of each layer. Without a list, as in the first published config, every second one is full attention."""
    require(num_layers <= MAX_LAYERS, "num_hidden_layers", f"at most {MAX_LAYERS}", num_layers)
    kinds = values.get("layer_types")
    if kinds is None:
        return tuple("full_attention" if i % 2 else "sliding_attention" for i in range(num_layers))
    require(isinstance(kinds, list), "layer_types", "a list", kinds)
    return tuple(kinds)


def _yarn(values: Mapping[str, Any], max_position_embeddings: int) -> YarnConfig:
    """Reads rope_parameters (transformers 5), or rope_theta and rope_scaling (transformers 4)."""
    default = YarnConfig()
    theta = _number(values, "rope_theta", default=default.rope_theta)
    section = "rope_parameters" if values.get("rope_parameters") is not None else "rope_scaling"
    rope = values.get(section)
    if rope is None:
        require(theta > 1, "rope_theta", "above 1", theta)
        return replace(default, rope_theta=theta)
    require(isinstance(rope, dict), section, "an object", rope)
    kind, where = rope.get("rope_type", rope.get("type")), f"{section}."
    require(kind == "yarn", f"{where}rope_type", "'yarn'", kind)
    require(rope.get("truncate") is False, f"{where}truncate", "false", rope.get("truncate"))
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        require(rope.get(name) is None, f"{where}{name}", "absent", rope.get(name))
    name = "original_max_position_embeddings"
    original = _number(rope, name, default=max_position_embeddings, where=where)
    require(original == int(original) > 0, f"{where}{name}", "a positive integer", original)
    yarn = YarnConfig(
        rope_theta=_number(rope, "rope_theta", default=theta, where=where),
        factor=_number(rope, "factor", where=where),
        beta_fast=_number(rope, "beta_fast", default=default.beta_fast, where=where),
        beta_slow=_number(rope, "beta_slow", default=default.beta_slow, where=where),
        original_max_position_embeddings=int(original),
    )
    require(yarn.rope_theta > 1, "rope_theta", "above 1", yarn.rope_theta)
    require(yarn.factor >= 1, f"{where}factor", "at least 1", yarn.factor)
    require(yarn.beta_fast > yarn.beta_slow > 0, f"{where}beta_fast", "above beta_slow, both positive", yarn.beta_fast)
    return yarn
