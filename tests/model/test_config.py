"""config.json in both spellings, and every way in which it can be wrong."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oscine.model.config import ModelConfig, gpt_oss_20b, gpt_oss_120b
from oscine.model.tensors import size_of, tensor_specs
from oscine.types import ModelSize
from tests.tiny import SMALL, WIDE_GROUP

# As published with gpt-oss-20b, less what no reader needs.
PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The published config with one field replaced, or removed where the value is ...."""
    values: dict[str, Any] = json.loads(json.dumps(PUBLISHED))
    *sections, name = path.split(".")
    section = values
    for key in sections:
        section = section[key]
    if value is ...:
        del section[name]
    else:
        section[name] = value
    return values


def test_the_published_config() -> None:
    config = ModelConfig.from_dict(PUBLISHED)
    assert config == gpt_oss_20b()
    assert config.layers_by_window == {None: tuple(range(1, 24, 2)), 128: tuple(range(0, 24, 2))}


def test_the_spelling_of_transformers_5() -> None:
    values = changed("rope_theta", ...)
    values["rope_parameters"] = values.pop("rope_scaling") | {"rope_theta": 150000}
    values["dtype"] = "bfloat16"
    del values["experts_per_token"]
    assert ModelConfig.from_dict(values) == gpt_oss_20b()


@pytest.mark.long
def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    from transformers import GptOssConfig, Mxfp4Config

    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    rope |= {"truncate": False, "original_max_position_embeddings": 4096}
    written = GptOssConfig(num_hidden_layers=24, num_local_experts=32, eos_token_id=200002, rope_parameters=rope)
    written.quantization_config = Mxfp4Config()
    written.save_pretrained(tmp_path)
    assert ModelConfig.from_file(tmp_path / "config.json") == gpt_oss_20b()


def test_only_experts_per_token_is_enough() -> None:
    assert ModelConfig.from_dict(changed("num_experts_per_tok", ...)) == gpt_oss_20b()


def test_layers_alternate_where_the_file_is_silent() -> None:
    assert ModelConfig.from_dict(changed("layer_types", ...)) == gpt_oss_20b()


def test_more_layers_than_memory_holds_are_refused_at_once() -> None:
    values = changed("layer_types", ...) | {"num_hidden_layers": 1 << 62}
    with pytest.raises(ValueError, match=f"num_hidden_layers must be at most 4096, not {1 << 62}"):
        ModelConfig.from_dict(values)


PER_LAYER = replace(
    WIDE_GROUP, num_local_experts=(9, 4, 2), sliding_window=(None, 8192, 50), layer_types=WIDE_GROUP.layer_types
)


def test_windows_and_experts_may_differ_by_layer() -> None:
    values = changed("sliding_window", [128, None, 128, 8192] * 6) | {"model_type": "gpt_oss_puzzle"}
    values["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"] * 6
    values["num_local_experts"] = [32, 16, 64] * 8
    config = ModelConfig.from_dict(values)
    assert config.windows == (128, None, 128, 8192) * 6
    assert config.experts == (32, 16, 64) * 8
    assert list(config.layers_by_window) == [None, 8192, 128]
    specs = tensor_specs(config)
    assert specs["model.layers.2.mlp.experts.down_proj_bias"].shape == (64, 2880)
    assert specs["model.layers.4.mlp.router.weight"].shape == (16, 2880)


def test_a_puzzle_as_it_is_published() -> None:
    """Its layers are in block_configs, and YaRN may be under a name of its own."""
    values = changed("layer_types", ...) | {"model_type": "gpt_oss_puzzle", "num_local_experts": None}
    values["yarn_rope_scaling"] = values.pop("rope_scaling")
    windows = [128, None, 128, 8192] * 6
    values["block_configs"] = [{"num_local_experts": 32 - i, "sliding_window": w} for i, w in enumerate(windows)]
    config = ModelConfig.from_dict(values)
    assert config.windows == (*windows,)
    assert config.experts == tuple(range(32, 8, -1))
    assert config.yarn == gpt_oss_20b().yarn
    values["block_configs"] = values["block_configs"][1:]
    with pytest.raises(ValueError, match="must be 24 values, one per layer"):
        ModelConfig.from_dict(values)


def test_safeguard_is_gpt_oss() -> None:
    """gpt-oss-safeguard-20b and -120b: the published configurations with another name."""
    values = PUBLISHED | {"_name_or_path": "openai/gpt-oss-safeguard-20b", "transformers_version": "4.57.0"}
    assert ModelConfig.from_dict(values) == gpt_oss_20b()


@pytest.mark.parametrize("quantization", [..., None, {"quant_method": "mxfp4", "dequantize": True}])
def test_what_is_trained_in_bfloat16_is_read(quantization: Any) -> None:
    assert ModelConfig.from_dict(changed("quantization_config", quantization)) == gpt_oss_20b()


def test_tied_embeddings_are_read() -> None:
    config = ModelConfig.from_dict(changed("tie_word_embeddings", True))
    assert config.tie_word_embeddings
    assert config.to_dict()["tie_word_embeddings"] is True


def test_fewer_experts_are_enough() -> None:
    assert ModelConfig.from_dict(changed("num_local_experts", 20)).experts == (20,) * 24


@pytest.mark.parametrize(
    "config", [SMALL, WIDE_GROUP, PER_LAYER, gpt_oss_120b()], ids=["small", "wide", "per layer", "120b"]
)
def test_what_is_written_is_read(config: ModelConfig) -> None:
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("model_type", "llama", "model_type"),
        ("hidden_size", "2880", "hidden_size"),
        ("hidden_size", 2890, "hidden_size"),
        ("head_dim", 63, "head_dim"),
        ("vocab_size", True, "vocab_size"),
        ("num_hidden_layers", -24, "num_hidden_layers"),
        ("num_key_value_heads", 7, "num_attention_heads"),
        ("num_experts_per_tok", 5, "experts_per_token"),
        ("num_local_experts", 3, "num_experts_per_tok"),
        ("layer_types", ["full_attention"], "layer_types"),
        ("layer_types", ["linear_attention"] * 24, "layer_types"),
        ("layer_types", "full_attention", "layer_types"),
        ("layer_types", ["sliding_attention"] * 24, "layer_types"),
        ("sliding_window", None, "sliding_window must be a positive integer in a sliding layer, not None"),
        ("sliding_window", [128] * 23, "sliding_window must be 24 values, one per layer"),
        ("sliding_window", [None] * 24, "sliding_window must be a positive integer in a sliding layer"),
        ("sliding_window", [0] * 24, "sliding_window"),
        ("num_local_experts", [32] * 25, "num_local_experts"),
        ("num_local_experts", [32] * 23 + ["16"], "num_local_experts"),
        ("num_local_experts", [32] * 23 + [3], "num_experts_per_tok"),
        ("rms_norm_eps", "small", "rms_norm_eps"),
        ("swiglu_limit", 0, "swiglu_limit"),
        ("swiglu_alpha", 1.5, "swiglu_alpha"),
        ("tie_word_embeddings", "yes", "tie_word_embeddings"),
        ("attention_bias", False, "attention_bias"),
        ("eos_token_id", "end", "eos_token_id"),
        ("eos_token_id", [300000], "eos_token_id"),
        ("architectures", ["GptOssForSequenceClassification"], "a classifier: it labels tokens and generates none"),
        ("model_type", "openai_privacy_filter", "a classifier: it labels tokens and generates none"),
        ("rope_scaling", [], "rope_scaling must be an object, not "),
        ("rope_scaling.rope_type", "linear", "rope_scaling.rope_type"),
        ("rope_scaling.truncate", True, "rope_scaling.truncate"),
        ("rope_scaling.factor", ..., r"rope_scaling\.factor is missing"),
        ("rope_scaling.factor", float("inf"), r"rope_scaling\.factor must be finite, not inf"),
        ("rope_theta", float("nan"), "rope_theta must be finite, not nan"),
        ("rms_norm_eps", 10**400, "rms_norm_eps must be finite, not 1000"),
        ("rope_scaling.factor", "32", "rope_scaling.factor"),
        ("rope_scaling.beta_fast", 0.5, "rope_scaling.beta_fast"),
        ("rope_scaling.beta_fast", "32", r"rope_scaling\.beta_fast must be a number, not '32'"),
        ("layer_types", "x" * 1_000_000, r"layer_types must be a list, not 'x{199}\.\.\.$"),
        ("rope_scaling.attention_factor", 2.0, "rope_scaling.attention_factor"),
        ("rope_scaling.original_max_position_embeddings", 0, "original_max_position_embeddings"),
        ("rope_theta", 1, "rope_theta"),
    ],
)
def test_a_wrong_field_is_named(path: str, value: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_dict(changed(path, value))


@pytest.mark.long
def test_what_a_file_does_not_say_is_transformers_default() -> None:
    from transformers import GptOssConfig

    defaults = GptOssConfig().to_dict()
    config = ModelConfig.from_dict(defaults)
    assert config == replace(gpt_oss_120b(), eos_token_ids=())
    assert ModelConfig.from_dict({}) == config
    assert ModelConfig.from_dict(dict.fromkeys(defaults.keys() - {"sliding_window", "model_type"})) == config
    rope = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
    theirs = GptOssConfig(rope_parameters=dict(rope)).to_dict()
    assert ModelConfig.from_dict({"rope_parameters": rope}) == ModelConfig.from_dict(theirs)
    assert ModelConfig.from_dict({"rope_parameters": rope}).yarn.original_max_position_embeddings == 131072


@pytest.mark.parametrize("value", [..., None])
def test_a_file_may_be_silent_about_the_end(value: Any) -> None:
    config = ModelConfig.from_dict(changed("eos_token_id", value))
    assert config == replace(gpt_oss_20b(), eos_token_ids=())
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_a_model_without_windows() -> None:
    values = changed("sliding_window", None) | {"layer_types": ["full_attention"] * 24}
    config = ModelConfig.from_dict(values)
    assert config.windows == (None,) * 24
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("text", ["{", "[1]", '{"model_type": "bert"}'])
def test_an_unreadable_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    for path in (tmp_path / "config.json", tmp_path / "absent.json"):
        with pytest.raises(ValueError, match=path.name):
            ModelConfig.from_file(path)


def test_published_sizes() -> None:
    """The parameters and byte sums of the published files, and the number of their tensors."""
    assert size_of(gpt_oss_20b()) == ModelSize(20_914_757_184, 13_761_264_768)
    assert size_of(gpt_oss_120b()) == ModelSize(116_829_156_672, 65_248_815_744)
    assert len(tensor_specs(gpt_oss_20b())) == 3 + 24 * 19
