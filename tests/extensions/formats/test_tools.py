"""Checkpoints that other tools write: the same weights, the error of what is quantised again, and refusals."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oscine.checkpoint.folder import open_folder
from oscine.checkpoint.hub import CONFIG, NANO_FOLDER, SINGLE
from oscine.checkpoint.layout import folder_config
from oscine.checkpoint.opened import open_model
from oscine.checkpoint.quantize import quantize
from oscine.engine.build import build_engine
from oscine.extensions.formats.layouts.encodings import ENCODINGS
from oscine.extensions.formats.layouts.table import LAYOUTS
from oscine.model.tensors import tensor_specs
from oscine.ops.moe.mxfp4 import dequantize
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions
from tests.extensions.formats.tools import LOSSLESS, LOSSY, Tensors, transformers, unsloth, write
from tests.model.answers import greedy
from tests.model.saved import save
from tests.model.tiny import tensors
from tests.tiny import SMALL
from training.evaluate import SKILLS, Asked, answer, engine_generator
from training.packing import Encoder

PROMPTS = [[5, 900, 31, 7, 77, 1200], [1, 2, 3]]


@pytest.fixture(scope="module")
def nano() -> Tensors:
    return load_file(NANO_FOLDER / SINGLE)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return greedy("oscine-nano", PROMPTS)


@pytest.fixture(scope="module")
def small() -> Tensors:
    return tensors(SMALL)


# ---- what is read ----


@pytest.mark.long
@pytest.mark.parametrize("layout", LOSSLESS)
def test_a_layout_that_loses_nothing_gives_the_same_tokens(
    tmp_path: Path, nano: Tensors, expected: list[list[int]], layout: str
) -> None:
    make, quantization = LOSSLESS[layout]
    write(tmp_path, folder_config(NANO_FOLDER / CONFIG), make(nano), quantization, files=2)
    assert greedy(str(tmp_path), PROMPTS) == expected


def quantised(values: Tensor) -> Tensor:
    return dequantize(*quantize(values)[0])


@pytest.mark.long
@pytest.mark.parametrize("layout", LOSSY)
def test_values_are_those_that_the_codes_mean(tmp_path: Path, small: Tensors, layout: str) -> None:
    """Experts are quantised again: to the same values as what the codes mean."""
    make, quantization = LOSSY[layout]
    made, meant = make(small)
    write(tmp_path, SMALL, made, quantization)
    found = open_model(ModelOptions(str(tmp_path)))
    for name, values in meant.items():
        if name.endswith("weight"):
            torch.testing.assert_close(found.source.get(name), values.bfloat16(), rtol=0.01, atol=1e-6)
            assert (found.source.get(name).float() - small[name].float()).norm() < 0.12 * small[name].float().norm()
        else:
            read = dequantize(*(found.source.get(f"{name}_{part}") for part in ("blocks", "scales")))
            difference = (read - quantised(values.float())).norm() / values.float().norm()
            assert difference < 1e-3, name  # a few values at the middle of two are rounded to the other
            bias = f"{name}_bias"
            assert torch.equal(found.source.get(bias), small[bias])
    errors = found.quantization_errors
    assert errors.keys() == {"gate_up_proj", "down_proj"}
    assert all(error.relative < 0.15 for error in errors.values())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_98_percent_of_the_skills_stay(tmp_path: Path, nano: Tensors) -> None:
    """Of those of the embedded model, in each layout whose values change."""
    encoder = Encoder(NANO_FOLDER)
    asked = [Asked.of(skill, 2) for skill in SKILLS]

    def right(model: Path) -> int:
        options = ModelOptions(str(model), tokenizer=str(NANO_FOLDER), device="cpu")
        cache = CacheOptions(kv_cache_bytes=1 << 30)
        built = build_engine(EngineOptions(options, cache=cache, quiet=True))
        texts = answer(engine_generator(built.loop, encoder), encoder, asked)
        return sum(2 - len(one.wrong(of_skill)) for one, of_skill in zip(asked, texts, strict=True))

    before = right(NANO_FOLDER)
    after = {}
    for layout, (make, quantization) in LOSSY.items():
        folder = tmp_path / layout
        write(folder, folder_config(NANO_FOLDER / CONFIG), make(nano)[0], quantization)
        after[layout] = right(folder)
    assert min(after.values()) >= 0.98 * before, (before, after)


def test_a_fine_tune_of_other_experts_in_each_layer(tmp_path: Path) -> None:
    """A pruned model: experts by the layer, in the order that the router has."""
    config = replace(SMALL, num_local_experts=(4, 7, 5, 6))
    made = tensors(config)
    write(tmp_path, config, unsloth(made)[0])
    source = open_folder(tmp_path, folder_config(tmp_path / CONFIG))
    for name in tensor_specs(config):
        if not name.endswith(("blocks", "scales")):
            assert torch.equal(source.get(name), made[name]), name
        elif name.endswith("blocks"):
            of = [name.replace("blocks", part) for part in ("blocks", "scales")]
            assert torch.equal(dequantize(*map(source.get, of)), dequantize(*(made[one] for one in of)))


def test_the_document_has_the_tools_of_the_table() -> None:
    text = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    for layout in LAYOUTS:
        assert all(words in text for words in layout.tool.split(", ")), layout.tool
    for encoding in (one for one in ENCODINGS if one.tool not in ("published", "floats")):
        assert encoding.tool.split(",")[0].split(" ")[0] in text, encoding.tool


# ---- what is refused ----


def change(folder: Path, change: Tensors) -> None:
    """Adds tensors, and takes out those that are empty."""
    held = load_file(folder / SINGLE) | change
    save_file({name: one for name, one in held.items() if one.numel()}, folder / SINGLE)


def refusal(folder: Path, *, read: str = "") -> str:
    with pytest.raises(ValueError) as error:
        open_folder(folder, folder_config(folder / CONFIG)).get(read)
    message = str(error.value).replace(f"{folder}/", "")
    assert "\n" not in message
    return message


NOTHING = torch.empty(0)
EXPERTS = "model.layers.2.mlp.experts"
UNSLOTH = f"{EXPERTS}.gate_up_projs.3"


@pytest.mark.parametrize(
    ("layout", "changed", "said"),
    [
        ("Unsloth, 4 bits", {f"{UNSLOTH}.weight": NOTHING}, "has dtype U8, with weight.nested_absmax"),
        ("Unsloth, 16 bits", {f"{UNSLOTH}.weight": NOTHING}, f"{EXPERTS}.3.gate_up_proj.weight is missing"),
        ("Unsloth, 16 bits", {f"{UNSLOTH}.bias": NOTHING}, f"{EXPERTS}.3.gate_up_proj.bias is missing"),
        (
            "Unsloth, 16 bits",
            {f"{UNSLOTH}.weight": torch.zeros(320, 64)},
            f"{UNSLOTH}.weight has shape [320, 64], not [320, 96]",
        ),
        (
            "Unsloth, 16 bits",
            {f"{EXPERTS}.gate_up_projs.5.weight": torch.zeros(320, 96)},
            f"{EXPERTS}.gate_up_projs.5.weight is not a tensor of this configuration",
        ),
        (
            "Unsloth, 16 bits",
            {f"{EXPERTS}.gate_up_proj": torch.zeros(5, 96, 320)},
            f"two layouts are mixed: {EXPERTS}.gate_up_proj (transformers) and {EXPERTS}.gate_up_projs.0.bias (Uns",
        ),
        (
            "Unsloth, 16 bits",
            {"module.model.norm.weight": torch.zeros(96)},
            "module.model.norm.weight and model.norm.weight are the same tensor",
        ),
        (
            "Unsloth, 16 bits",
            {f"{UNSLOTH}.weight": torch.zeros(320, 96, dtype=torch.int32)},
            f"{UNSLOTH}.weight has dtype I32, not BF16",
        ),
        (
            "mlx-lm, 4 bits",
            {f"{EXPERTS}.up_proj.weight": torch.zeros(5, 160, 7, dtype=torch.uint32)},
            f"{EXPERTS}.up_proj.weight has shape [5, 160, 7]: 2.33333 bits per value",
        ),
        ("mlx-lm, 4 bits", {f"{EXPERTS}.up_proj.weight": NOTHING}, "which no known tool writes"),
        (
            "ModelOpt, NVFP4",
            {f"{EXPERTS}.gate_up_proj": torch.zeros(5, 96, 320, dtype=torch.uint8)},
            f"{EXPERTS}.gate_up_proj has shape [5, 96, 320], not [5, 48, 320]",
        ),
        (
            "llm-compressor, int4",
            {f"{EXPERTS}.3.up_proj.weight_zero_point": torch.zeros(1)},
            f"{EXPERTS}.3.up_proj.weight_zero_point: written by llm-compressor, with zero points, which is not read; ",
        ),
        (
            "torch.compile",
            {"model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.zeros(1)},
            "written by PEFT, with an adapter beside the weights, which is not read; to convert: `model.merge_and_",
        ),
        ("transformers", {"block.0.attn.qkv.weight": torch.zeros(1)}, "serve the files in the root"),
        (
            "transformers",
            {"model.layers.0.self_attn.q_proj.qweight": torch.zeros(1)},
            '`python -c "from gptqmodel.utils',
        ),
        ("transformers", {"score.weight": torch.zeros(1)}, "written by transformers, as a classifier"),
    ],
)
def test_a_wrong_folder_is_refused_in_one_line(
    tmp_path: Path, small: Tensors, layout: str, changed: Tensors, said: str
) -> None:
    make, quantization = (LOSSLESS | LOSSY)[layout]  # type: ignore[operator]
    made = make(small)
    write(tmp_path, SMALL, made if isinstance(made, dict) else made[0], quantization)
    change(tmp_path, changed)
    assert said in refusal(tmp_path)


@pytest.mark.parametrize(
    ("layout", "part", "value", "said"),
    [
        (
            "llm-compressor, MXFP4",
            f"{EXPERTS}.3.up_proj.weight_scale",
            255,
            "up_proj.weight_packed: a weight is not finite",
        ),
        ("llm-compressor, FP8", f"{EXPERTS}.3.up_proj.weight_scale", torch.nan, "a weight is not finite"),
        ("llm-compressor, NVFP4", f"{EXPERTS}.3.up_proj.weight_global_scale", torch.nan, "a weight is not finite"),
        ("llm-compressor, FP8", "model.layers.2.self_attn.q_proj.weight_scale", torch.nan, "a weight is not finite"),
        ("Unsloth, 4 bits", f"{UNSLOTH}.weight.nested_absmax", torch.nan, "a weight is not finite"),
        ("Unsloth, 4 bits", f"{UNSLOTH}.weight.quant_state.bitsandbytes__nf4", ord(" "), "Expecting value"),
        ("mlx-lm, 4 bits", f"{EXPERTS}.up_proj.scales", torch.inf, "a weight is not finite"),
    ],
)
def test_values_that_are_no_numbers_are_named(
    tmp_path: Path, small: Tensors, layout: str, part: str, value: float, said: str
) -> None:
    make, quantization = (LOSSLESS | LOSSY)[layout]  # type: ignore[operator]
    made = make(small)
    made = made if isinstance(made, dict) else made[0]
    made[part] = torch.full_like(made[part], value)
    write(tmp_path, SMALL, made, quantization)
    read = "model.layers.2.self_attn.q_proj.weight" if "q_proj" in part else f"{EXPERTS}.gate_up_proj_blocks"
    message = refusal(tmp_path, read=read)
    assert message.startswith(f"{SINGLE}: ")
    assert said in message


def test_scales_that_do_not_fit_are_named(tmp_path: Path, small: Tensors) -> None:
    made, _ = LOSSY["llm-compressor, FP8"][0](small)
    name = "model.layers.2.self_attn.q_proj.weight"
    made[f"{name}_scale"] = torch.ones(5, 1)
    write(tmp_path, SMALL, made, {"quant_method": "compressed-tensors"})
    assert refusal(tmp_path, read=name).endswith(f"{name}: scales of shape [5, 1] do not fit a matrix of [512, 96]")


def test_nvfp4_without_a_scale_of_all_is_not_mxfp4(tmp_path: Path, small: Tensors) -> None:
    made, _ = LOSSY["llm-compressor, NVFP4"][0](small)
    name = f"{EXPERTS}.3.up_proj.weight"
    del made[f"{name}_global_scale"]
    write(tmp_path, SMALL, made, {"quant_method": "compressed-tensors"})
    message = refusal(tmp_path, read=f"{EXPERTS}.gate_up_proj_scales")
    assert message.endswith(f"{name}_packed: scales of MXFP4 are uint8 [160, 3], not float8_e4m3fn [160, 6]")


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (
            "gptq",
            r"quantization_config\.quant_method 'gptq': written by GPTQModel, which is not read; to convert: `python",
        ),
        ("torchao", ".*save the model again from its 16-bit form"),
        ("x", r"quantization_config\.quant_method must be one of 'mxfp4', 'bitsandbytes', .*, not 'x'"),
        (None, r"quantization_config\.quant_method must be one of .*, not None"),
    ],
)
def test_a_quantisation_that_is_not_read_is_named(tmp_path: Path, method: object, said: str) -> None:
    save(tmp_path, SMALL, tensors(SMALL))
    values = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(values | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path / CONFIG))}: {said}"):
        open_model(ModelOptions(str(tmp_path)))


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("__0_0.distcp", "written by FSDP, in shards, which is not read; to convert: `accelerate merge-weights"),
        ("zero_to_fp32.py", "`python IN/zero_to_fp32.py IN OUT --safe_serialization`"),
        ("pytorch_model.bin", "written by torch, as pickles"),
    ],
)
def test_a_folder_without_safetensors_says_what_it_has(tmp_path: Path, file: str, said: str) -> None:
    save(tmp_path, SMALL, tensors(SMALL))
    (tmp_path / SINGLE).rename(tmp_path / file)
    assert said in refusal(tmp_path)


def test_shards_without_an_index(tmp_path: Path, small: Tensors) -> None:
    write(tmp_path, SMALL, transformers(small), files=3)
    source = open_folder(tmp_path, folder_config(tmp_path / CONFIG))
    assert torch.equal(source.get("model.norm.weight"), small["model.norm.weight"])
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert refusal(tmp_path) == "model-00002-of-00003.safetensors: missing"


def test_a_truncated_shard(tmp_path: Path, small: Tensors) -> None:
    write(tmp_path, SMALL, transformers(small), files=2)
    path = tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert refusal(tmp_path).startswith("model-00002-of-00002.safetensors: truncated or malformed: ")
