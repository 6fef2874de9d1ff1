"""The shape of an EAGLE-3 head for gpt-oss, read from the config.json of any published format.

Formats differ in how they count layers, where they put their flags, and what they leave out:

| format | found by | layer ids | flags |
|---|---|---|---|
| speculators (Red Hat) | speculators_model_type | boundaries | beside transformer_layer_config (the geometry) |
| NVIDIA's | eagle_config | outputs; boundaries if the largest is the target's number of layers | in eagle_config |
| SpecForge (LMSYS), Nebius | else | as NVIDIA's | in eagle_config, or beside the geometry |

Boundary i is the residual stream before layer i of the target; its number of layers is the one after the last layer.
Output i is boundary i + 1. The id -1 is the last boundary, through the target's final norm.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscine.model.config import ModelConfig, YarnConfig, read_config, require

_IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
_PLAIN = ("default", "linear")  # rope without any scaling, if the factor is 1


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Sizes and rules of a head. Its hidden size is the target's."""

    hidden_size: int
    intermediate_size: int
    head_dim: int
    num_attention_heads: int
    num_key_value_heads: int
    draft_vocab_size: int  # tokens that it can draft
    vocab_size: int  # of the target
    aux_layers: tuple[int, ...]  # boundaries
    rms_norm_eps: float
    yarn: YarnConfig  # factor 1 is plain rope
    window: int | None = None  # tokens; None is full attention
    rounded_ramp: bool = False  # YaRN's ramp begins and ends at whole dimensions
    taps_normed: bool = False  # the tap is the target's final hidden state, after its norm
    norm_before_fc: bool = False  # one norm over all tapped states
    fc_norm: bool = False  # a norm for each tapped state
    norm_before_residual: bool = False  # the residual is the normed feature
    norm_output: bool = False  # the next draft's feature is the hidden state after the final norm

    @classmethod
    def from_file(cls, path: Path, target: ModelConfig) -> "HeadConfig":
        """Raises ValueError naming the file and what in it does not fit this implementation or the target."""
        return read_config(path, lambda values: cls.from_dict(values, target))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], target: ModelConfig) -> "HeadConfig":
        """Raises ValueError naming the field."""
        of_speculators = "speculators_model_type" in values or "transformer_layer_config" in values
        layer, eagle = _object(values, "transformer_layer_config", values), _object(values, "eagle_config", {})
        flags = {**values, **eagle}
        _check_supported(flags, layer, of_speculators)
        hidden = _size(layer, "hidden_size")
        heads = _size(layer, "num_attention_heads")
        kv_heads = _size(layer, "num_key_value_heads", heads)
        vocabulary = _size(layer, "vocab_size", target.vocab_size)
        _check_fits(flags, hidden, vocabulary, target)
        require(heads % kv_heads == 0, "num_attention_heads", f"a multiple of num_key_value_heads ({kv_heads})", heads)
        draft_vocabulary = _size(values, "draft_vocab_size", _size(values, "truncated_vocab_size", vocabulary))
        require(draft_vocabulary <= vocabulary, "draft_vocab_size", f"at most {vocabulary}", draft_vocabulary)
        aux_layers, normed = _taps(flags, target.num_hidden_layers, of_speculators)
        yarn, rounded = _rope(layer)
        return cls(
            hidden_size=hidden,
            intermediate_size=_size(layer, "intermediate_size"),
            head_dim=_size(layer, "head_dim", hidden // heads),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            draft_vocab_size=draft_vocabulary,
            vocab_size=vocabulary,
            aux_layers=aux_layers,
            taps_normed=normed,
            rms_norm_eps=_number(layer, "rms_norm_eps", 1e-6),
            yarn=yarn,
            rounded_ramp=rounded,
            window=_window(layer),
            norm_before_fc=flags.get("norm_before_fc") is True,
            fc_norm=flags.get("fc_norm") is True,
            norm_before_residual=flags.get("norm_before_residual") is True,
            norm_output=of_speculators and flags.get("norm_output") is True,
        )


def _check_supported(flags: Mapping[str, Any], layer: Mapping[str, Any], of_speculators: bool) -> None:
    only: dict[str, tuple[object, ...]] = {
        "num_hidden_layers": (1,),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    }
    for name, allowed in only.items():
        value = layer.get(name, allowed[0])
        require(value in allowed, name, repr(allowed[0]), value)
    only = {
        "speculators_model_type": ("eagle3",),
        "use_input_layernorm_in_first_layer": (True,),
        "use_last_layernorm": (True,),
        "use_mtp_layernorm": (False,),
        "parallel_draft_step": (1,),
        "parallel_drafting": (False,),
    }
    for name, allowed in only.items():
        value = flags.get(name, allowed[0])
        require(value in allowed, name, repr(allowed[0]), value)
    # In SpecForge the name means the norm before the output matrix, which every head here has.
    drops_norm = not of_speculators and flags.get("norm_output") is False
    require(not drops_norm, "norm_output", "true", False)
    both = flags.get("norm_before_fc") is True and flags.get("fc_norm") is True
    require(not both, "fc_norm", "false beside norm_before_fc", True)


def _check_fits(flags: Mapping[str, Any], hidden: int, vocabulary: int, target: ModelConfig) -> None:
    layers = target.num_hidden_layers
    expected = f"the target's ({target.hidden_size})"
    require(hidden == target.hidden_size, "hidden_size", expected, hidden)
    require(vocabulary == target.vocab_size, "vocab_size", f"the target's ({target.vocab_size})", vocabulary)
    width, count = flags.get("target_hidden_size"), flags.get("target_layer_count")
    require(width in (None, target.hidden_size), "target_hidden_size", expected, width)
    require(count in (None, layers), "target_layer_count", f"the target's number of layers ({layers})", count)


def _taps(flags: Mapping[str, Any], num_layers: int, of_speculators: bool) -> tuple[tuple[int, ...], bool]:
    """Boundaries, and whether the only one is read through the final norm."""
    name = next((name for name in _IDS if flags.get(name) is not None), _IDS[0])
    ids = flags.get(name)
    if ids is None:
        if flags.get("use_aux_hidden_state") is False:
            return (num_layers,), True
        return (2, num_layers // 2, num_layers - 3), False
    whole = isinstance(ids, Sequence) and bool(ids) and all(type(i) is int for i in ids)
    require(whole, name, "a list of layers", ids)
    if [*ids] == [-1]:
        return (num_layers,), True
    boundaries = of_speculators or max(ids) == num_layers
    aux_layers = tuple(ids) if boundaries else tuple(i + 1 for i in ids)
    require(all(0 <= tap <= num_layers for tap in aux_layers), name, f"layers of a target with {num_layers}", ids)
    return aux_layers, False


def _window(layer: Mapping[str, Any]) -> int | None:
    kinds = layer.get("layer_types")
    if kinds is None:
        slides = layer.get("use_sliding_window") is True
    else:
        require(kinds in (["full_attention"], ["sliding_attention"]), "layer_types", "of one layer", kinds)
        slides = kinds == ["sliding_attention"]
    return _size(layer, "sliding_window") if slides else None


def _rope(layer: Mapping[str, Any]) -> tuple[YarnConfig, bool]:
    """YaRN or plain rope, and whether the ramp is rounded."""
    section = "rope_parameters" if layer.get("rope_parameters") is not None else "rope_scaling"
    rope = _object(layer, section, {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    where = f"{section}."
    theta = _number(rope, "rope_theta", _number(layer, "rope_theta", 10000.0), where)
    require(theta > 1, "rope_theta", "above 1", theta)
    factor = _number(rope, "factor", 1.0, where)
    if kind in _PLAIN:
        require(factor == 1, f"{section}.factor", "1 without YaRN", factor)
        return YarnConfig(rope_theta=theta, factor=1.0), False
    require(kind == "yarn", f"{section}.rope_type", "'yarn' or 'default'", kind)
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        require(rope.get(name) is None, f"{section}.{name}", "absent", rope.get(name))
    ramp = {name: _number(rope, name, default, where) for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))}
    original = _size(rope, "original_max_position_embeddings", where=where)
    require(factor >= 1, f"{section}.factor", "at least 1", factor)
    require(ramp["beta_fast"] > ramp["beta_slow"] > 0, f"{section}.beta_fast", "above beta_slow", ramp["beta_fast"])
    return YarnConfig(theta, factor, **ramp, original_max_position_embeddings=original), rope.get(
        "truncate"
    ) is not False


def _object(values: Mapping[str, Any], name: str, default: Mapping[str, Any]) -> Mapping[str, Any]:
    value = values.get(name)
    if value is None:
        return default
    require(isinstance(value, dict), name, "an object", value)
    found: Mapping[str, Any] = value
    return found


def _size(values: Mapping[str, Any], name: str, default: int | None = None, where: str = "") -> int:
    """`where`: the way to `values`, as messages name it; as of _number."""
    value = values.get(name)
    if value is None and default is not None:
        return default
    require(type(value) is int and value > 0, where + name, "a positive integer", value)
    assert isinstance(value, int)
    return value


def _number(values: Mapping[str, Any], name: str, default: float, where: str = "") -> float:
    value = values.get(name)
    if value is None:
        return default
    require(type(value) in (int, float) and value > 0, where + name, "a positive number", value)
    return float(value)
