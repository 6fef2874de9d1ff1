"""Checkpoints written, read, and refused when anything is wrong, before a tensor is read."""

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oscine.checkpoint import hub
from oscine.checkpoint import opened as opened_module
from oscine.checkpoint.folder import Checkpoint, fingerprint
from oscine.checkpoint.hub import INDEX, NANO_FOLDER, SINGLE
from oscine.checkpoint.opened import open_model
from oscine.model.random_weights import RandomTensors
from oscine.model.skewed_weights import SkewedTensors
from oscine.model.tensors import Shard, tensor_specs
from oscine.model.weights import load_weights
from oscine.ops.interface import MxExperts
from oscine.settings.config import ModelOptions
from tests.model.saved import save
from tests.model.tiny import CPU, checkpoint_bytes, tensors
from tests.ops.bound import reference_ops
from tests.tiny import SMALL

KEY = "model.layers.2.self_attn.k_proj.weight"
BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save(tmp_path, SMALL, tensors(SMALL))
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save(tmp_path, SMALL, tensors(SMALL), max_shard_bytes=250_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    return tmp_path


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_every_tensor_comes_back(layout: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(layout)
    checkpoint = Checkpoint(folder, SMALL)
    for name, tensor in tensors(SMALL).items():
        assert torch.equal(checkpoint.get(name), tensor)
    files = (load_file(path) for path in folder.glob("*.safetensors"))
    assert sum(t.nbytes for file in files for t in file.values()) == checkpoint_bytes(SMALL)


def test_queries_keys_and_values_are_fused_and_layers_prepared_in_order(single: Path) -> None:
    made, seen = tensors(SMALL), []

    def prepare(experts: MxExperts) -> MxExperts:
        seen.append(experts.down_blocks)
        return experts

    weights = open_model(ModelOptions(model=str(single))).load(ops=replace(reference_ops(), prepare_experts=prepare))
    prefix = "model.layers.3.self_attn."
    fused = torch.cat([made[f"{prefix}{name}_proj.weight"] for name in "qkv"]).float()
    assert torch.equal(weights.layers[3].qkv_weight_FH, fused)
    assert weights.layers[3].experts.down_blocks.dtype == torch.uint8
    names = [f"model.layers.{index}.mlp.experts.down_proj_blocks" for index in range(4)]
    assert all(torch.equal(blocks, made[name]) for blocks, name in zip(seen, names, strict=True))


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    held = load_file(path)
    change(held)
    save_file(held, path)


def test_weights_are_told_apart_wherever_and_in_how_many_files_they_are(tmp_path: Path) -> None:
    for name, shard_bytes in (("a", None), ("b", 250_000)):
        save(tmp_path / name, SMALL, tensors(SMALL), max_shard_bytes=shard_bytes)
    before = fingerprint(tmp_path / "a")
    assert fingerprint(tmp_path / "b") == before
    rewrite(tmp_path / "a" / SINGLE, lambda found: found[KEY].mul_(1.5))
    assert fingerprint(tmp_path / "a") != before


def test_the_fingerprint_has_the_middle_of_each_tensor(tmp_path: Path) -> None:
    """Files of scales, of pages and of packed weights are found by it, so it stays the same."""
    held = {
        "b.long": torch.arange(5000, dtype=torch.float32),
        "a": torch.ones(3, 5, dtype=torch.bfloat16),
        "c": torch.arange(1025).to(torch.uint8),
        "none": torch.empty(0),
    }
    save_file(held, tmp_path / SINGLE, metadata={"format": "pt"})
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(held):
        data = held[name].flatten().view(torch.uint8).numpy().tobytes()
        start = max(0, (len(data) - 1024) // 2)
        digest.update(name.encode() + b"\0" + data[start : start + 1024])
    assert fingerprint(tmp_path) == digest.hexdigest()


def test_packed_weights_of_files_that_were_written_again_have_another_name(tmp_path: Path) -> None:
    save(tmp_path, SMALL, tensors(SMALL))

    def name() -> str | None:
        return open_model(ModelOptions(model=str(tmp_path))).packed_name("int8", Shard())

    before, written = name(), (tmp_path / SINGLE).stat().st_mtime_ns
    assert name() == before
    os.utime(tmp_path / SINGLE, ns=(written, written + 1))
    assert name() != before
    os.utime(tmp_path / SINGLE, ns=(written, written))
    assert name() == before


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        Checkpoint(folder, SMALL)
    return str(error.value)


def test_a_missing_tensor(single: Path) -> None:
    rewrite(single / SINGLE, lambda held: held.pop(KEY))
    assert refusal(single) == f"{single / SINGLE}: {KEY} is missing"


def test_a_tensor_missing_from_its_shard(sharded: Path) -> None:
    file = sharded / json.loads((sharded / INDEX).read_text())["weight_map"][KEY]
    rewrite(file, lambda held: held.pop(KEY))
    assert refusal(sharded) == f"{file}: {KEY} is missing"


def test_an_extra_tensor(single: Path) -> None:
    rewrite(single / SINGLE, lambda held: held.update(surplus=torch.zeros(3)))
    assert refusal(single) == f"{single / SINGLE}: surplus is not a tensor of this configuration"


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    first, *_, last = sorted(sharded.glob("*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    rewrite(last, lambda held: held.update({name: tensor}))
    assert refusal(sharded) == f"{last}: {name} is also in {first.name}"


def test_a_misshapen_tensor(single: Path) -> None:
    rewrite(single / SINGLE, lambda held: held.update({KEY: torch.zeros(128, 95, dtype=torch.bfloat16)}))
    assert refusal(single) == f"{single / SINGLE}: {KEY} has shape [128, 95], not [128, 96]"


def test_a_tensor_of_another_dtype(single: Path) -> None:
    rewrite(single / SINGLE, lambda held: held.update({BLOCKS: held[BLOCKS].view(torch.int8)}))
    assert refusal(single) == f"{single / SINGLE}: {BLOCKS} has dtype I8, not U8"


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_a_truncated_file(single: Path, keep: int) -> None:
    path = single / SINGLE
    path.write_bytes(path.read_bytes()[:keep])
    assert refusal(single).startswith(f"{path}: truncated")


def test_bytes_that_belong_to_no_tensor(single: Path) -> None:
    path = single / SINGLE
    path.write_bytes(path.read_bytes() + b"\0" * 7)
    assert refusal(single).startswith(f"{path}: truncated or malformed: ")


@pytest.mark.parametrize(
    "header", [b"nonsense", b"[1, 2]  ", b'{"x": 1}', b'{"x": {"dtype": "U8", "shape": 3, "data_offsets": [0, 1]}}']
)
def test_a_header_that_is_no_header(single: Path, header: bytes) -> None:
    (single / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    assert refusal(single).startswith(f"{single / SINGLE}: ")


@pytest.mark.parametrize("offsets", [[-4, 24572], [0, "end"], [0], None])
def test_offsets_that_are_no_offsets(single: Path, offsets: object) -> None:
    path = single / SINGLE
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header[KEY]["data_offsets"] = offsets
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    assert refusal(single).startswith(f"{path}: ")


def test_a_missing_shard(sharded: Path) -> None:
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.unlink()
    assert refusal(sharded).startswith(f"{file}: missing; the index places ")


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": 1}}']
)
def test_a_broken_index(sharded: Path, index: str) -> None:
    (sharded / INDEX).write_text(index)
    assert refusal(sharded).startswith(f"{sharded / INDEX}: ")


def test_an_index_that_forgets_a_tensor(sharded: Path) -> None:
    values = json.loads((sharded / INDEX).read_text())
    del values["weight_map"][KEY]
    (sharded / INDEX).write_text(json.dumps(values))
    assert refusal(sharded) == f"{sharded / INDEX}: {KEY} is missing"


def test_a_folder_without_weights(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"{tmp_path}: holds neither ")


@pytest.mark.parametrize("name", ["no such model", "", "x" * 5000, "x\0"])
def test_a_model_that_is_nowhere(name: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(repr(name))} is neither a folder"):
        open_model(ModelOptions(model=name))


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="is about a torch for CPUs")
def test_a_torch_for_cpus_says_which_one_is_needed() -> None:
    with pytest.raises(ValueError, match=r"--device 'cuda' cannot be used: .* `pip install --force-reinstall 'torch>="):
        open_model(ModelOptions(device="cuda"))


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("gpu", "--device must be cpu, cuda or cuda:N, not 'gpu'"),
        ("cuda:63", "--device 'cuda:63' cannot be used: "),
    ],
)
def test_a_device_that_is_not_there(device: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        open_model(ModelOptions(device=device, random_weights="20b"))


@pytest.mark.multi_gpu
def test_a_device_that_is_not_the_first() -> None:
    with torch.cuda.device(0):
        assert open_model(ModelOptions(device="cuda:1", random_weights="20b")).device == torch.device("cuda", 1)
        assert torch.cuda.current_device() == 1


def test_a_hub_name_that_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="'openai/gpt-oss-20b' is not in the local cache"):
        hub.find_model(ModelOptions("openai/gpt-oss-20b"))


def test_a_hub_download_takes_the_root_files_only() -> None:
    from huggingface_hub.utils import filter_repo_objects

    root = ["config.json", "chat_template.jinja", "model-00000-of-00002.safetensors", "tokenizer.json"]
    others = ["original/config.json", "original/model.safetensors", "metal/model.bin", "README.md"]
    kept = filter_repo_objects(root + others, allow_patterns=hub.ROOT_FILES, ignore_patterns=hub.FOLDERS)
    assert list(kept) == root


def test_random_weights_repeat_and_have_the_stated_spread() -> None:
    once, again, other = (RandomTensors(SMALL, seed, CPU) for seed in (1, 1, 2))
    for name, spec in tensor_specs(SMALL).items():
        tensor = once.get(name)
        assert tuple(tensor.shape) == spec.shape
        assert torch.equal(tensor, again.get(name))
        if "norm" in name:
            assert (tensor == 1).all()
        elif tensor.dtype == torch.bfloat16:
            assert not torch.equal(tensor, other.get(name))
    matrix = once.get("lm_head.weight").float()
    assert matrix.mean().abs() < 1e-3
    assert matrix.std().item() == pytest.approx(0.02, rel=0.05)
    assert once.get(BLOCKS.replace("blocks", "scales")).unique().tolist() == [118, 119, 120, 121]
    assert once.get(BLOCKS).flatten().bincount(minlength=256).min() > 0
    assert not torch.equal(once.get("lm_head.weight"), once.get("model.embed_tokens.weight"))


def test_random_weights_by_config_file(single: Path) -> None:
    for path in (single, single / "config.json"):
        opened = open_model(ModelOptions(random_weights=str(path), dtype="bfloat16"))
        assert opened.config == SMALL
        skewed = open_model(ModelOptions(random_weights=f"{path}:skewed"))
        assert (skewed.config, type(skewed.source)) == (SMALL, SkewedTensors)
    assert opened.load().layers[0].experts.gate_up_bias.dtype == torch.bfloat16
    assert open_model(ModelOptions(random_weights="120b")).config.num_local_experts == 128
    for name in ("200b", "120b:skew", "200b:skewed", "120b:skewed:skewed", ":skewed"):
        with pytest.raises(
            ValueError, match=f"--random-weights '{name}' is neither 20b nor 120b nor a config.json, wi"
        ):
            open_model(ModelOptions(random_weights=name))


def test_a_config_file_may_have_any_name(single: Path, tmp_path: Path) -> None:
    named = tmp_path / "config.json:skewed"
    named.write_bytes((single / "config.json").read_bytes())
    assert isinstance(open_model(ModelOptions(random_weights=str(named))).source, RandomTensors)
    assert isinstance(open_model(ModelOptions(random_weights=f"{named}:skewed")).source, SkewedTensors)


def test_random_weights_have_the_vocabulary_of_their_api(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokenizer(shapes: str) -> Path | None:
        return open_model(ModelOptions(random_weights=shapes, device="cpu")).tokenizer

    monkeypatch.setattr(opened_module, "o200k_folder", lambda: tmp_path / "o200k")
    assert tokenizer("20b") == tmp_path / "o200k"
    assert tokenizer(str(NANO_FOLDER)) == tokenizer(f"{NANO_FOLDER}:skewed") == NANO_FOLDER
    assert tokenizer(str(single)) is None  # it has fewer tokens

    def lacking() -> Path:
        raise ValueError("the o200k_harmony vocabulary needs the package oss-harmony")

    monkeypatch.setattr(opened_module, "o200k_folder", lacking)
    assert tokenizer("20b") is None


def test_float_tensors_take_the_asked_dtype() -> None:
    weights = load_weights(SMALL, RandomTensors(SMALL, 0, CPU), CPU, torch.float32)
    assert weights.embed_VH.dtype == weights.layers[0].sinks_Q.dtype == torch.float32
