"""`oscine verify` on the embedded model as it is, and with wrong weights: each is named by layer and part."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.harmony_parser import HarmonyParser
from oscine.chat.tokenizer import Tokenizer
from oscine.checkpoint.hub import NANO_FOLDER, SINGLE
from oscine.checkpoint.opened import OpenedModel, open_model
from oscine.cli import main
from oscine.extensions.verify import harmony
from oscine.extensions.verify.compare import Comparison, compare, equal, generate, part, read
from oscine.extensions.verify.questions import Answers
from oscine.extensions.verify.reference import (
    CheckpointTensors,
    Plain,
    Reference,
    Transformers,
    check_memory,
    reference_of,
)
from oscine.extensions.verify.served import Served
from oscine.model.config import gpt_oss_20b, gpt_oss_120b
from oscine.model.tensors import tensor_specs
from oscine.settings.config import ModelOptions
from tests.model.saved import save
from tests.model.tiny import tensors as tensors_of
from tests.tiny import SMALL

PROMPT = torch.randint(0, 1900, (150,), generator=torch.Generator().manual_seed(3)).tolist()  # beyond the window
Dtype = Literal["float32", "bfloat16"]
WHOLE, EXPERTS = None, "mlp.experts."
# One wrong element in each: layer, tensor, and the part that names it. Each part has the reference's input, so all can
# be wrong at once.
WRONG = (
    (WHOLE, "model.embed_tokens.weight", "embed_tokens"),
    (0, "input_layernorm.weight", "input_layernorm.weight"),
    (1, "self_attn.q_proj.weight", "self_attn.q_proj"),
    (2, "self_attn.k_proj.weight", "self_attn.k_proj"),
    (3, "self_attn.v_proj.weight", "self_attn.v_proj"),
    (1, "self_attn.k_proj.bias", "self_attn.k_proj.bias"),
    (4, "self_attn.sinks", "self_attn.sinks"),
    (5, "self_attn.o_proj.weight", "self_attn.o_proj"),
    (3, "self_attn.o_proj.bias", "self_attn.o_proj.bias"),
    (2, "post_attention_layernorm.weight", "post_attention_layernorm.weight"),
    (4, "mlp.router.weight", "mlp.router.weight"),
    (0, "mlp.router.bias", "mlp.router.bias"),
    (0, f"{EXPERTS}gate_up_proj_scales", "mlp.experts"),
    (2, f"{EXPERTS}gate_up_proj_bias", "mlp.experts"),
    (3, f"{EXPERTS}down_proj_scales", "mlp.experts"),
    (5, f"{EXPERTS}down_proj_bias", "mlp.experts"),
    (WHOLE, "model.norm.weight", "norm"),
    (WHOLE, "lm_head.weight", "lm_head"),
)
EXPERT = 5  # whose tensors are wrong


def full_name(layer: int | None, tensor: str) -> str:
    return tensor if layer is None else f"model.layers.{layer}.{tensor}"


def wrong(tensor: Tensor) -> Tensor:
    """One element is changed, by 1; the exponent of a scale by 3."""
    tensor = tensor.clone()
    place = (EXPERT, *[2] * (tensor.dim() - 1))
    tensor[place] += 3 if tensor.dtype == torch.uint8 else 1
    return tensor


class WrongTensors:
    def __init__(self, opened: OpenedModel, names: set[str]) -> None:
        self._source, self._names = opened.source, names

    def get(self, name: str) -> Tensor:
        tensor = self._source.get(name)
        return wrong(tensor) if name in self._names else tensor


def compared(
    make: Callable[[CheckpointTensors], Reference], dtype: Dtype, names: set[str], device: str = "cpu"
) -> Comparison:
    """`names`: tensors that are read well, and become wrong when they are brought to the device."""
    opened = open_model(ModelOptions(device=device, dtype=dtype))
    tensors = CheckpointTensors(NANO_FOLDER, opened.config)
    served = Served(replace(opened, source=WrongTensors(opened, names)), len(PROMPT) + 4, progress=False)
    return compare(served, opened.source, tensors, make(tensors), PROMPT, 4, progress=False)


def plain(tensors: CheckpointTensors) -> Reference:
    return Plain(tensors, "a test wants it")


def differing(found: Comparison) -> set[tuple[int | None, str]]:
    return {(one.layer, one.name) for one in found.parts if not one.agrees}


@pytest.mark.parametrize(("make", "dtype"), [(Transformers, "float32"), (plain, "float32"), (plain, "bfloat16")])
def test_the_embedded_model_agrees_in_every_part(make: Callable[[CheckpointTensors], Reference], dtype: Dtype) -> None:
    found = compared(make, dtype, set())
    assert not differing(found)
    assert found.whole.agrees
    assert found.first_difference is None
    assert {one.layer for one in found.parts} == {None, 0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize(("make", "dtype"), [(Transformers, "float32"), (plain, "bfloat16")])
def test_each_wrong_weight_is_named_by_its_layer_and_part(
    make: Callable[[CheckpointTensors], Reference], dtype: Dtype
) -> None:
    found = compared(make, dtype, {full_name(layer, tensor) for layer, tensor, _ in WRONG})
    wanted = {(layer, name) for layer, _, name in WRONG}
    assert wanted <= differing(found)
    # a wrong norm, bias or sink also shows in what is computed with it, in the same layer
    assert {layer for layer, _ in differing(found)} == {layer for layer, _ in wanted}
    assert differing(found) - wanted <= {
        *((0, f"self_attn.{name}_proj") for name in "qkv"),
        (1, "self_attn.k_proj"),
        (4, "self_attn"),
        (3, "self_attn.o_proj"),
        (2, "post_attention_layernorm"),
        (2, "mlp.router"),
        (0, "mlp.router"),
        (4, "mlp.router"),
    }
    experts = [one for one in found.parts if one.name == "mlp.experts" and not one.agrees]
    assert {one.experts for one in experts} == {(EXPERT,)}
    assert found.first_difference == "embed_tokens"


def test_every_tensor_of_a_layer_has_a_wrong_weight_in_these_tests() -> None:
    """But for packed values: the rounding of int8 activations may hide a single one, which is compared as read."""
    of_layer = {name.split(".", 3)[-1] for name in tensor_specs(open_model(ModelOptions()).config) if "layers" in name}
    unseen = {f"{EXPERTS}{name}_proj_blocks" for name in ("gate_up", "down")}
    assert of_layer - unseen - {tensor for _, tensor, _ in WRONG} == {
        "self_attn.q_proj.bias",
        "self_attn.v_proj.bias",
    }


def test_each_tensor_is_compared_as_it_is_read() -> None:
    opened = open_model(ModelOptions(device="cpu"))
    tensors, layer = CheckpointTensors(NANO_FOLDER, opened.config), 2
    reference = plain(tensors).layer(layer, 1)
    names = {name for name in tensor_specs(opened.config) if name.startswith(f"model.layers.{layer}.")}
    for name in names:
        (found,) = [one for one in read(WrongTensors(opened, {name}), reference, layer) if not one.agrees]
        assert name.startswith(f"model.layers.{layer}.{found.name}")
        assert found.experts == ((EXPERT,) if name.endswith(("blocks", "scales")) else ())


def test_embedding_norm_and_head_are_compared_as_they_are_read() -> None:
    opened = open_model(ModelOptions(device="cpu"))
    tensors = CheckpointTensors(NANO_FOLDER, opened.config)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert equal(opened.source, None, "x", name, tensors.get(name)).agrees
        assert not equal(WrongTensors(opened, {name}), None, "x", name, tensors.get(name)).agrees


@pytest.mark.parametrize("what", ["logits", "tokens"])
def test_a_model_that_puts_right_parts_together_wrongly_differs(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are of the position before; or the last token is one that no greedy choice takes."""

    def wrongly(served: Served, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], Tensor]:
        tokens, logits_TV = generate(served, prompt, new_tokens)
        if what == "logits":
            return tokens, logits_TV.roll(1, 0)
        worst = int(logits_TV[-2].argmin())
        return [*tokens[:-1], worst], torch.cat((logits_TV[:-1], served.step([worst], len(tokens) - 1)))

    monkeypatch.setattr("oscine.extensions.verify.compare.generate", wrongly)
    found = compared(plain, "float32", set())
    assert not differing(found)
    assert (found.whole.relative_error > found.whole.bound) == (what == "logits")
    assert found.first_difference == "logits of the whole model, though each part agrees"


def test_a_renderer_or_a_parser_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(NANO_FOLDER)
    render, feed = HarmonyRenderer.render, HarmonyParser.feed
    monkeypatch.setattr(HarmonyRenderer, "render", lambda *given: render(*given)[:-1])
    assert harmony.check(tokenizer).differences == tuple(f"prompt {name!r}" for name in harmony.PROMPTS)
    monkeypatch.setattr(HarmonyRenderer, "render", render)
    monkeypatch.setattr(HarmonyParser, "feed", lambda parser, ids: feed(parser, ids[:-3]))
    assert harmony.check(tokenizer).differences == tuple(f"completion {name!r}" for name in harmony.COMPLETIONS)


def test_few_right_answers_are_a_difference() -> None:
    assert Answers(50, 25, 0, ()).agrees
    assert not Answers(50, 24, 0, ()).agrees


def test_values_that_are_not_finite_differ() -> None:
    nothing, one = torch.tensor([torch.nan, 1.0]), torch.ones(2)
    assert not part(0, "x", nothing, one, one).agrees
    assert not part(0, "x", one, nothing, one).agrees
    assert not part(0, "x", one / 0, one, one / 0).agrees


def copy_of_nano(folder: Path, name: str) -> Path:
    shutil.copytree(NANO_FOLDER, folder, ignore=shutil.ignore_patterns("eagle3"))
    tensors = load_file(folder / SINGLE)
    tensors[name] = wrong(tensors[name])
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return folder


def test_the_command_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "found.json"
    assert main(["verify", "oscine-nano", "--output", str(output), "--points", "1:16:64", "--device", "cpu"]) == 0
    found = json.loads(output.read_text())
    assert found["agrees"]
    assert found["first_difference"] is None
    assert found["comparison"]["reference"].startswith("transformers ")
    assert found["comparison"]["fingerprint"] == found["fingerprint"]
    assert found["comparison"]["whole"]["tokens"] == found["comparison"]["whole"]["equal_tokens"]
    assert found["harmony"]["prompts"] > 5
    assert not found["harmony"]["differences"]
    assert found["questions"]["questions"] == 50
    assert found["questions"]["right"] >= 45
    assert [(point["concurrency"], point["isl"], point["osl"]) for point in found["throughput"]] == [(1, 16, 64)]
    assert found["machine"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert "\nagrees" in printed
    assert printed.endswith(f"\nwritten: {output}\n")


def test_the_command_names_the_layer_of_a_wrong_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = copy_of_nano(tmp_path / "copy", "model.layers.3.mlp.experts.down_proj_scales")
    options = ("--reference", str(NANO_FOLDER), "--weights-only", "--device", "cpu")
    output = tmp_path / "found.json"
    assert main(["verify", str(copy), *options, "--output", str(output)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(
        f"oscine: error: layer 3: mlp.experts.down_proj of experts {EXPERT} differs from transformers "
    )
    found = json.loads(output.read_text())
    assert not found["agrees"]
    assert found["questions"] is None
    assert found["throughput"] == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["oscine-nano", "--max-model-len", "1483", "--output", "/dev/null"],
            "--max-model-len must be at least 1,484 for the questions and their answers, or given with --weights-only, "
            "not 1483",
        ),
        (["oscine-nano", "--points", "1:2"], "a point is C:ISL:OSL, like 64:1024:256, not '1:2'"),
        (["oscine-nano", "--output", "/"], "--output /: no file can be written there: Is a directory"),
        (
            ["oscine-nano", "--output", "/proc/x"],
            "--output /proc/x: no file can be written there: No such file or directory",
        ),
        (
            ["oscine-nano", "--output", "/dev/null", "--points", "1:64:200000"],
            "--points 1:64:200000: 200064 tokens are more than the model's context, 131072",
        ),
        (["oscine-nano", "--device", "cuda:0,1"], "--device must be one device"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    assert capsys.readouterr().err == f"oscine: error: {error}\n"


def test_a_reference_in_another_layout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert main(["verify", "oscine-nano", "--reference", str(file), "--output", str(tmp_path / "x.json")]) == 1
    assert "verify reads folders in the published layout" in capsys.readouterr().err


def test_a_truncated_reference_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(NANO_FOLDER, copy, ignore=shutil.ignore_patterns("eagle3"))
    file = copy / SINGLE
    file.write_bytes(file.read_bytes()[:-100])
    options = ("--weights-only", "--device", "cpu", "--output", str(tmp_path / "x.json"))
    assert main(["verify", "oscine-nano", "--reference", str(copy), *options]) == 1
    assert f"oscine: error: {file}: truncated or malformed: " in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "x.json").exists()


def test_a_reference_of_another_shape_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, SMALL, tensors_of(SMALL))
    assert main(["verify", "oscine-nano", "--reference", str(tmp_path), "--output", str(tmp_path / "x.json")]) == 1
    assert f"{tmp_path}: model.embed_tokens.weight has the shape " in capsys.readouterr().err


def test_the_reference_says_why_it_is_not_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = open_model(ModelOptions(device="cpu")).config
    tensors = CheckpointTensors(NANO_FOLDER, config)
    tensors.config = replace(config, num_local_experts=(8,) * config.num_hidden_layers)
    assert reference_of(tensors).name.endswith("in float32, as transformers has no models whose layers differ")
    monkeypatch.setattr("oscine.extensions.verify.reference.find_spec", lambda name: None)
    assert reference_of(tensors).name.endswith("in float32, as transformers is not installed")


def test_a_host_without_memory_for_a_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscine.extensions.verify.reference.available_bytes", lambda: 20 << 30)
    check_memory(gpt_oss_20b())
    with pytest.raises(ValueError, match="the reference needs 25 GB of host memory; 21 GB are free"):
        check_memory(gpt_oss_120b())


@pytest.mark.gpu
def test_a_gpu_agrees_and_a_wrong_weight_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where transformers is not installed, against plain torch."""
    options = ("--weights-only", "--device", "cuda", "--output", str(tmp_path / "found.json"))
    assert main(["verify", "oscine-nano", *options]) == 0, capsys.readouterr().err
    name = "mlp.experts.gate_up_proj_scales"
    copy = copy_of_nano(tmp_path / "copy", f"model.layers.2.{name}")
    assert main(["verify", str(copy), "--reference", str(NANO_FOLDER), *options]) == 1
    assert f"layer 2: mlp.experts.gate_up_proj of experts {EXPERT} differs from" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_gpu_names_each_wrong_weight(dtype: Dtype) -> None:
    assert not differing(compared(plain, dtype, set(), "cuda"))
    found = compared(plain, dtype, {full_name(layer, tensor) for layer, tensor, _ in WRONG}, "cuda")
    assert {(layer, name) for layer, _, name in WRONG} <= differing(found)
