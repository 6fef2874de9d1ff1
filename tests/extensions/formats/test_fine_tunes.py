"""Models as transformers and PEFT save them after training: read, quantised, converted, merged."""

import json
import os
import resource
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oscine.checkpoint import hub
from oscine.checkpoint.folder import Checkpoint, open_folder
from oscine.checkpoint.hub import CONFIG, NANO_FOLDER, SINGLE
from oscine.checkpoint.opened import open_model
from oscine.checkpoint.quantize import errors_of
from oscine.cli import main
from oscine.extensions.formats import convert as convert_module
from oscine.extensions.formats.convert import convert
from oscine.model.config import ModelConfig
from oscine.model.gpt_oss import GptOss
from oscine.model.tensors import tensor_specs
from oscine.ops.moe.mxfp4 import dequantize
from oscine.settings.config import ModelOptions
from tests.model.answers import greedy
from tests.model.saved import save
from tests.model.test_gpt_oss import transformers_logits, transformers_model
from tests.model.tiny import DictSource, random_tokens, relative_error, tensors, whole
from tests.ops.bound import reference_ops
from tests.tiny import SMALL

PROMPTS = [[5, 900, 31, 7, 77, 1200], [1, 2, 3]]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in bfloat16, as transformers writes it after it has dequantised it."""
    folder = tmp_path_factory.mktemp("export")
    transformers_model(NANO_FOLDER).bfloat16().save_pretrained(folder, max_shard_size="10MB")
    return folder


def values_of(checkpoint: Any, config: ModelConfig) -> dict[str, Tensor]:
    """All tensors; experts as values."""
    found = {}
    for name in tensor_specs(config):
        if name.endswith("_blocks"):
            matrix = name.removesuffix("_blocks")
            found[matrix] = dequantize(checkpoint.get(name), checkpoint.get(f"{matrix}_scales"))
        elif not name.endswith("_scales"):
            found[name] = checkpoint.get(name).float()
    return found


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def opened(folder: Path) -> tuple[Any, ModelConfig]:
    config = ModelConfig.from_file(folder / CONFIG)
    return open_folder(folder, config), config


# ---- what transformers saves ----


@pytest.mark.slow
def test_an_export_of_transformers_gives_the_same_weights_and_tokens(export: Path) -> None:
    """Its experts are values of MXFP4 already, so nothing is lost."""
    checkpoint, config = opened(export)
    assert same(values_of(checkpoint, config), values_of(Checkpoint(NANO_FOLDER, config), config))
    assert {error.relative for error in checkpoint.errors.values()} == {0.0}
    assert greedy(str(export), PROMPTS) == greedy(str(NANO_FOLDER), PROMPTS)


def write_floats(
    folder: Path, made: dict[str, Tensor], *, dtype: torch.dtype = torch.bfloat16, end: str = "", **more: Any
) -> dict[str, Tensor]:
    """A model that was never quantised: experts of random values, [experts, in, out]."""
    floats = {name: tensor.to(dtype) for name, tensor in made.items() if tensor.dtype != torch.uint8}
    for name, tensor in made.items():
        if name.endswith("_blocks"):
            experts, rows, blocks, _ = tensor.shape
            generator = torch.Generator().manual_seed(len(floats))
            weight = torch.randn(experts, blocks * 32, rows, generator=generator) * 0.05
            floats[name.removesuffix("_blocks") + end] = weight.to(dtype)
    folder.mkdir(exist_ok=True)
    values = {k: v for k, v in SMALL.to_dict().items() if k != "quantization_config"} | more
    (folder / CONFIG).write_text(json.dumps(values))
    save_file(floats, folder / SINGLE, metadata={"format": "pt"})
    return floats


@pytest.mark.long
@pytest.mark.parametrize("end", ["", "_blocks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_experts_in_floats_are_quantised_and_all_else_is_read_as_bfloat16(
    tmp_path: Path, dtype: torch.dtype, end: str
) -> None:
    """`end`: of the names of experts. transformers keeps "_blocks" for what it has dequantised itself."""
    floats = write_floats(tmp_path, tensors(SMALL), dtype=dtype, end=end)
    found = open_model(ModelOptions(str(tmp_path)))
    found.load()
    errors = found.quantization_errors
    assert errors.keys() == {"gate_up_proj", "down_proj"}
    assert all(0.08 < error.relative < 0.12 for error in errors.values())  # of normal values
    read = values_of(found.source, found.config)
    for name, tensor in floats.items():
        if tensor.dim() == 3:
            matrix = read[name.removesuffix(end)].mT
            assert (matrix - tensor.float()).norm() < 0.12 * tensor.float().norm()
        else:
            assert torch.equal(read[name], tensor.bfloat16().float())


@pytest.mark.slow
def test_logits_of_a_fine_tune_are_those_of_its_quantised_weights(tmp_path: Path) -> None:
    """transformers computes the same with what Oscine has loaded."""
    write_floats(tmp_path / "model", tensors(SMALL))
    found = open_model(ModelOptions(str(tmp_path / "model")))
    ours = GptOss(found.config, found.load(), reference_ops())
    save(tmp_path / "rounded", SMALL, {name: found.source.get(name) for name in tensor_specs(SMALL)})
    tokens = random_tokens(SMALL, 40)
    theirs = transformers_logits(transformers_model(tmp_path / "rounded"), tokens, 0)
    assert relative_error(whole(ours, tokens, 0), theirs) < 1e-5


def test_tied_embeddings(tmp_path: Path) -> None:
    made = tensors(SMALL)
    del made["lm_head.weight"]
    write_floats(tmp_path, made, tie_word_embeddings=True)
    checkpoint, _ = opened(tmp_path)
    assert torch.equal(checkpoint.get("lm_head.weight"), made["model.embed_tokens.weight"])
    write_floats(tmp_path, made)
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing"):
        opened(tmp_path)


def test_a_converted_model_has_a_head_of_its_own(tmp_path: Path) -> None:
    """With tied embeddings, other programs would not read what an adapter of the head has changed."""
    made = tensors(SMALL)
    del made["lm_head.weight"]
    write_floats(tmp_path / "model", made, tie_word_embeddings=True)
    factors = torch.ones(2, SMALL.hidden_size), torch.ones(SMALL.vocab_size, 2)
    adapter = write_adapter(tmp_path / "adapter", {"lm_head": factors})
    convert(options_of(tmp_path / "model"), tmp_path / "out", lora=adapter, quiet=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    checkpoint, _ = opened(tmp_path / "out")
    assert torch.equal(checkpoint.get("lm_head.weight"), (made["model.embed_tokens.weight"].float() + 6).bfloat16())


def change(folder: Path, name: str, tensor: Tensor | None) -> None:
    held = load_file(folder / SINGLE)
    held.pop(name, None)
    save_file(held if tensor is None else held | {name: tensor}, folder / SINGLE)


MATRIX = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(5, 96, 160).bfloat16(), r"down_proj has shape \[5, 96, 160\], not \[5, 160, 96\]"),
        (torch.zeros(5, 160, 96).to(torch.int8), "down_proj has dtype I8, not BF16"),
        (None, "down_proj_blocks is missing"),
    ],
)
def test_wrong_experts_are_refused_before_they_are_read(tmp_path: Path, tensor: Tensor | None, message: str) -> None:
    write_floats(tmp_path, tensors(SMALL))
    change(tmp_path, MATRIX, tensor)
    with pytest.raises(ValueError, match=message):
        opened(tmp_path)


def test_experts_that_are_not_finite_are_named(tmp_path: Path) -> None:
    write_floats(tmp_path, tensors(SMALL))
    change(tmp_path, MATRIX, torch.full((5, 160, 96), torch.inf).bfloat16())
    checkpoint, _ = opened(tmp_path)
    with pytest.raises(ValueError, match=r"model\.safetensors: model\.layers\.1\.mlp\.experts\.down_proj: .*finite"):
        checkpoint.get(f"{MATRIX}_scales")


SCALES_OF_A_CACHE = (
    "k_scale",  # compressed-tensors and Quark; one per layer, or one per head
    "v_scale",
    "q_scale",
    "attn.k_scale",  # vLLM
    "attn.v_scale",
    "k_proj.k_scale",  # ModelOpt
    "v_proj.v_scale",
    "kv_scale",  # of older exports, for both
    "k_proj.output_scale",  # compressed-tensors, of older exports
    "v_proj.output_scale",
    "prob_scale",  # of FP8 attention
)


@pytest.mark.long
@pytest.mark.parametrize("name", SCALES_OF_A_CACHE)
def test_calibrated_scales_of_a_kv_cache_are_left_out(tmp_path: Path, name: str) -> None:
    made = tensors(SMALL)
    save(tmp_path, SMALL, made)
    for layer in range(SMALL.num_hidden_layers):
        change(tmp_path, f"model.layers.{layer}.self_attn.{name}", torch.ones(SMALL.num_key_value_heads))
    checkpoint, config = opened(tmp_path)
    assert checkpoint.kv_scales == SMALL.num_hidden_layers
    assert same(values_of(checkpoint, config), values_of(DictSource(made), config))


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.weight_scale", "model.layers.1.mlp.k_scale"])
def test_scales_of_anything_else_are_not_left_out(tmp_path: Path, name: str) -> None:
    save(tmp_path, SMALL, tensors(SMALL))
    assert opened(tmp_path)[0].kv_scales == 0
    change(tmp_path, name, torch.ones(()))
    with pytest.raises(ValueError, match=f"{name} is not a tensor of this configuration"):
        opened(tmp_path)


# ---- oscine convert ----


@pytest.mark.slow
def test_a_converted_model_has_the_published_layout_and_the_same_weights(export: Path, tmp_path: Path) -> None:
    options = ModelOptions(str(export), tokenizer=str(NANO_FOLDER))
    errors = convert(options, tmp_path / "out", shard_bytes=3_000_000, quiet=True)
    assert len(errors) == 12
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    checkpoint, config = opened(tmp_path / "out")
    assert checkpoint.get("model.layers.0.mlp.experts.down_proj_blocks").dtype == torch.uint8
    assert same(values_of(checkpoint, config), values_of(Checkpoint(NANO_FOLDER, config), config))
    assert not errors_of(checkpoint)
    assert hub.find_tokenizer(ModelOptions(str(tmp_path / "out"))) == tmp_path / "out"
    json_files = {path.name for path in (tmp_path / "out").glob("*.json")}
    assert "conversion.json" not in json_files


@pytest.fixture
def floats(tmp_path: Path) -> Path:
    write_floats(tmp_path / "floats", tensors(SMALL))
    return tmp_path / "floats"


def options_of(folder: Path) -> ModelOptions:
    return ModelOptions(str(folder), tokenizer=str(NANO_FOLDER))


def fail_after(number: int) -> Iterator[None]:
    yield from [None] * number
    raise KeyboardInterrupt


def test_an_interrupted_conversion_is_continued(floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_errors = convert(options_of(floats), tmp_path / "whole", shard_bytes=100_000, quiet=True)
    calls, write = fail_after(2), convert_module._write
    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "_write", lambda path, made: (next(calls), write(path, made)))
        with pytest.raises(KeyboardInterrupt):
            convert(options_of(floats), tmp_path / "out", shard_bytes=100_000, quiet=True)
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(written) == 2
    with pytest.raises(ValueError, match=r"config\.json"):
        opened(tmp_path / "out")
    errors = convert(options_of(floats), tmp_path / "out", shard_bytes=100_000, quiet=True)
    assert errors == whole_errors
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in written} == written
    made = [{path.name: path.read_bytes() for path in (tmp_path / end).iterdir()} for end in ("out", "whole")]
    assert made[0] == made[1]


def test_a_shard_that_cannot_be_written_is_an_error_of_the_disk(floats: Path, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"model\.safetensors\.part: .*File too large"):
            convert(options_of(floats), tmp_path / "out", quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["conversion.json"]


def test_a_target_with_files_is_refused(floats: Path, tmp_path: Path) -> None:
    for target in (floats, NANO_FOLDER / CONFIG):
        with pytest.raises(ValueError, match="it is there already"):
            convert(options_of(floats), target, quiet=True)
    (tmp_path / "conversion.json").write_text("{}")
    with pytest.raises(ValueError, match="unfinished conversion of another model"):
        convert(options_of(floats), tmp_path, quiet=True)


def test_a_converted_model_has_the_mode_of_any_other_file(floats: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        convert(options_of(floats), tmp_path / "out", quiet=True)
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()} == {"0o640"}


def in_the_cache_of_the_hub(model: Path, cache: Path) -> Path:
    snapshot, blobs = cache / "models--a--b/snapshots/0", cache / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in model.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    return snapshot


def test_links_are_copied_within_a_folder_and_within_a_repository_of_the_cache(floats: Path, tmp_path: Path) -> None:
    (floats / "real.jinja").write_text("{{ messages }}")
    (floats / "chat_template.jinja").symlink_to("real.jinja")
    snapshot = in_the_cache_of_the_hub(floats, tmp_path / "cache")
    convert(options_of(snapshot), tmp_path / "out", quiet=True)
    assert not (tmp_path / "out/chat_template.jinja").is_symlink()
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"


@pytest.mark.parametrize("target", ["/etc/hostname", "/dev/zero", "../secret", "/proc/self/environ"])
def test_links_that_leave_the_folder_are_not_copied(floats: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "secret").write_text("secret")
    (floats / "generation_config.json").symlink_to(target)
    for given in (lambda: floats, lambda: in_the_cache_of_the_hub(floats, tmp_path / "cache")):
        with pytest.raises(
            ValueError, match=r"generation_config\.json: is a link that leaves the folder, so it is not "
        ):
            convert(options_of(given()), tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


# ---- LoRA ----


def write_adapter(folder: Path, factors: dict[str, tuple[Tensor, Tensor]], **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", "base_model_name_or_path": "x", **more}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    made: dict[str, Tensor] = {}
    for module, (a, b) in factors.items():
        made |= {f"base_model.model.{module}.lora_{part}.weight": t for part, t in (("A", a), ("B", b))}
    save_file(made, folder / "adapter_model.safetensors")
    return folder


QUERY = "model.layers.2.self_attn.q_proj"


def test_an_adapter_is_merged(floats: Path, tmp_path: Path) -> None:
    a, b = torch.randint(-3, 3, (2, 96)).float(), torch.randint(-3, 3, (512, 2)).float()
    adapter = write_adapter(tmp_path / "adapter", {QUERY: (a, b)})
    convert(options_of(floats), tmp_path / "out", lora=adapter, quiet=True)
    before, after = (values_of(*opened(folder)) for folder in (floats, tmp_path / "out"))
    merged = before.pop(f"{QUERY}.weight") + 3 * b @ a
    assert torch.equal(after.pop(f"{QUERY}.weight"), merged.bfloat16().float())
    assert same(before, after)


EXPERTS = "model.layers.2.mlp.experts"


@pytest.mark.parametrize("in_floats", [False, True])
def test_an_adapter_of_experts_is_merged(floats: Path, tmp_path: Path, in_floats: bool) -> None:
    """In PEFT's form: ranks of an expert are rows beside each other in A, and every fifth column in B."""
    base = floats
    if not in_floats:
        convert(options_of(floats), tmp_path / "base", quiet=True)
        base = tmp_path / "base"
    gate_up = torch.randn(10, 96) * 0.1, torch.randn(320, 10) * 0.1
    down = torch.randn(10, 160) * 0.1, torch.randn(96, 10) * 0.1
    adapter = write_adapter(tmp_path / "adapter", {f"{EXPERTS}.base_layer": gate_up, EXPERTS: down})
    errors = convert(options_of(base), tmp_path / "out", lora=adapter, quiet=True)
    assert errors.keys() >= {f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"}
    before, after = values_of(*opened(base)), values_of(*opened(tmp_path / "out"))
    for matrix, (a, b) in (("gate_up_proj", gate_up), ("down_proj", down)):
        delta = torch.einsum("ore,eri->eoi", b.reshape(len(b), 2, 5), a.reshape(5, 2, -1))
        name = f"{EXPERTS}.{matrix}"
        stored = load_file(base / SINGLE)[name].float().mT if in_floats else before[name]
        expected = stored + 3 * delta
        assert (after.pop(name) - expected).norm() < 0.12 * expected.norm()
        del before[name]
    assert same(before, after)


@pytest.mark.parametrize(
    ("module", "shapes", "more", "message"),
    [
        (QUERY, ((2, 96), (500, 2)), {}, r"q_proj: there is no matrix for factors of \[2, 96\] and \[500, 2\]"),
        ("model.layers.9.self_attn.q_proj", ((2, 96), (512, 2)), {}, "there is no matrix"),
        (EXPERTS, ((9, 96), (320, 9)), {}, "there is no matrix"),
        (QUERY, ((2, 2, 96), (512, 2)), {}, r"there is no matrix for factors of \[2, 2, 96\]"),
        (QUERY, ((2, 96), (512, 2)), {"use_dora": True}, "use_dora must be false, not true: merge it by .* PEFT"),
        (QUERY, ((2, 96), (512, 2)), {"modules_to_save": ["lm_head"]}, "cannot be merged: merge it by .* of PEFT"),
        (QUERY, ((2, 96), (512, 2)), {"init_lora_weights": "pissa_niter_16"}, "changes the base model"),
        (
            QUERY,
            ((2, 96), (512, 2)),
            {"r": "many"},
            "not the configuration of .* r must be a positive integer, not 'ma",
        ),
        (QUERY, ((2, 96), (512, 2)), {"r": True}, "r must be a positive integer, not True"),
        (QUERY, ((2, 96), (512, 2)), {"lora_alpha": "6"}, "lora_alpha must be a number, not '6'"),
        (QUERY, ((2, 96), (512, 2)), {"lora_alpha": float("nan")}, r"adapter_config\.json: lora_alpha must be finite"),
        (QUERY, ((64, 96), (512, 64)), {}, r"q_proj has factors of rank 64, and adapter_config\.json says 2"),
        (
            QUERY,
            ((600, 96), (512, 600)),
            {"r": 600},
            "has factors of rank 600, more than its matrix has rows or columns",
        ),
        (QUERY, ((4, 96), (512, 4)), {"rank_pattern": {"q_proj": 8}}, r"rank 4, and adapter_config\.json says 8"),
        (
            QUERY,
            ((2, 96), (512, 2)),
            {"rank_pattern": {"q_proj": 0}},
            r"rank_pattern\.q_proj must be a positive integer",
        ),
        (QUERY, ((2, 96), (512, 2)), {"alpha_pattern": {"q_proj": "6"}}, r"alpha_pattern\.q_proj must be a number"),
        (QUERY, ((2, 96), (512, 2)), {"rank_pattern": {"(q|k)_proj": 2}}, "must be an object with names of modules"),
        (EXPERTS, ((20, 96), (320, 20)), {}, r"experts has factors of rank 4, and adapter_config\.json says 2"),
        ("model.layers.9.mlp.experts", ((10, 96), (320, 10)), {}, "there is no matrix"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused(
    floats: Path, tmp_path: Path, module: str, shapes: tuple[tuple[int, int], ...], more: dict[str, Any], message: str
) -> None:
    a, b = map(torch.zeros, shapes)
    adapter = write_adapter(tmp_path / "adapter", {module: (a, b)}, **more)
    with pytest.raises(ValueError, match=message):
        convert(options_of(floats), tmp_path / "out", lora=adapter, quiet=True)


def test_ranks_and_scales_of_modules_are_respected(floats: Path, tmp_path: Path) -> None:
    a, b = torch.randn(4, 96), torch.randn(512, 4)
    more = {"rank_pattern": {"layers.2.self_attn.q_proj": 4}, "alpha_pattern": {"q_proj": 10}}
    adapter = write_adapter(tmp_path / "adapter", {QUERY: (a, b)}, **more)
    convert(options_of(floats), tmp_path / "out", lora=adapter, quiet=True)
    before, after = (values_of(*opened(folder)) for folder in (floats, tmp_path / "out"))
    merged = before.pop(f"{QUERY}.weight") + 2.5 * (b @ a)
    assert torch.equal(after.pop(f"{QUERY}.weight"), merged.bfloat16().float())


@pytest.mark.parametrize("module", [QUERY, EXPERTS])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_what_is_not_finite_is_not_merged(floats: Path, tmp_path: Path, module: str, value: float) -> None:
    """The last one is finite itself, and its product with another is not."""
    shapes = ((2, 96), (512, 2)) if module == QUERY else ((10, 96), (320, 10))
    factors = torch.full(shapes[0], value), torch.full(shapes[1], 3e38)
    adapter = write_adapter(tmp_path / "adapter", {module: factors})
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: .*not finite"):
        convert(options_of(floats), tmp_path / "out", lora=adapter, quiet=True)


def test_factors_are_not_read_before_their_shapes_are_checked(floats: Path, tmp_path: Path) -> None:
    """The file has a hole of 6 GB."""
    shape, header = [1_500_000, 1_000], dict[str, Any]()
    for number, part in enumerate("AB"):
        start = number * 3_000_000_000
        offsets = [start, start + 3_000_000_000]
        header[f"base_model.model.{QUERY}.lora_{part}.weight"] = {"dtype": "BF16", "shape": shape} | {
            "data_offsets": offsets
        }
    adapter, text = write_adapter(tmp_path / "adapter", {}), json.dumps(header).encode()
    with (adapter / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 6_000_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="there is no matrix for factors of"):
        convert(options_of(floats), tmp_path / "out", lora=adapter, quiet=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_the_command_says_that_it_merged_an_adapter(
    floats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", {QUERY: (torch.zeros(2, 96), torch.zeros(512, 2))})
    command = ["convert", str(floats), str(tmp_path / "out"), "--tokenizer", str(NANO_FOLDER), "--lora", str(adapter)]
    assert main(command) == 0
    assert f"{floats}, with the adapter {adapter} merged into it, is in {tmp_path / 'out'}: " in capsys.readouterr().out


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    write_adapter(tmp_path, {})
    with pytest.raises(
        ValueError,
        match=r"not a model: serve it .* `oscine serve BASE --enable-lora --lora-modules .* or merge it .*`oscine conv",
    ):
        hub.find_model(ModelOptions(str(tmp_path)))
