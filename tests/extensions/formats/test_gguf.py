"""GGUF files: the same weights as in safetensors, the same checks, and types of blocks against ggml's own package."""

import mmap
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from oscine.checkpoint import hub
from oscine.checkpoint.folder import Checkpoint, fingerprint
from oscine.checkpoint.hub import NANO_FOLDER
from oscine.checkpoint.opened import open_model
from oscine.checkpoint.quantize import quantize
from oscine.extensions.formats.gguf.blocks import READ, floats
from oscine.extensions.formats.gguf.checkpoint import GgufCheckpoint
from oscine.extensions.formats.gguf.config import config_of
from oscine.extensions.formats.gguf.file import TYPES, Gguf, Stored
from oscine.model.config import ModelConfig
from oscine.model.o200k import NUM_TOKENS, SPECIAL_IDS
from oscine.model.tensors import tensor_specs
from oscine.ops.moe.mxfp4 import dequantize
from oscine.settings.config import ModelOptions
from tests.model.answers import greedy
from tests.model.gguf_files import Encode, Quantization, gguf, write_llama_cpp, write_ollama
from tests.model.tiny import tensors
from tests.tiny import SMALL

CONFIG = replace(SMALL, eos_token_ids=(3,))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_llama_cpp(path, CONFIG, tensors(CONFIG))
    return path


def opened(path: Path) -> GgufCheckpoint:
    file = Gguf(path)
    return GgufCheckpoint(file, config_of(file))


# ---- the same model ----


def test_the_configuration_comes_back(written: Path, tmp_path: Path) -> None:
    assert config_of(Gguf(written)) == CONFIG
    write_ollama(tmp_path / "blob", CONFIG, tensors(CONFIG))
    assert config_of(Gguf(tmp_path / "blob")) == CONFIG


def test_every_tensor_comes_back(written: Path) -> None:
    found = opened(written)
    for name, tensor in tensors(CONFIG).items():
        assert torch.equal(found.get(name).float(), tensor.float()), name


def test_every_tensor_of_ollamas_first_layout_comes_back(tmp_path: Path) -> None:
    write_ollama(tmp_path / "blob", CONFIG, tensors(CONFIG))
    found = opened(tmp_path / "blob")
    for name, tensor in tensors(CONFIG).items():
        assert torch.equal(found.get(name).float(), tensor.float()), name


def test_a_model_in_several_files(written: Path, tmp_path: Path) -> None:
    write_llama_cpp(tmp_path / "m.gguf", CONFIG, tensors(CONFIG), max_tensors=20)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 3
    assert fingerprint(parts[0]) == fingerprint(written)
    for given in (tmp_path, parts[0], parts[2]):
        assert hub.find_model(ModelOptions(str(given))) == parts[0]
    parts[2].unlink()
    with pytest.raises(ValueError, match=f"{parts[2].name}: cannot be read: No such file"):
        Gguf(parts[0])


def test_a_name_without_a_valid_part_number_is_one_file(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "m-00000-of-00000.gguf"
    path.symlink_to(written)
    assert hub.find_model(ModelOptions(str(path))) == hub.find_model(ModelOptions(str(tmp_path))) == path
    assert config_of(Gguf(path)) == CONFIG


def test_ggml_reads_packed_experts_as_oscine_does(written: Path) -> None:
    """ggml's own package reads the experts that the tests have packed."""
    stored = next(t for t in gguf.GGUFReader(written).tensors if t.name == "blk.1.ffn_down_exps.weight")
    theirs = torch.from_numpy(gguf.quants.dequantize(stored.data, Quantization.MXFP4))
    made = tensors(CONFIG)
    blocks, scales = (made[f"model.layers.1.mlp.experts.down_proj_{part}"] for part in ("blocks", "scales"))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
    ours = torch.ldexp(values[nibbles], scales.int().unsqueeze(-1) - 127).flatten(-2)
    assert torch.equal(theirs.view_as(ours), ours)


@pytest.mark.long
def test_the_embedded_model_gives_the_same_tokens_from_every_format(tmp_path: Path) -> None:
    config = ModelConfig.from_file(NANO_FOLDER / "config.json")
    checkpoint = Checkpoint(NANO_FOLDER, config)
    made = {name: checkpoint.get(name) for name in tensor_specs(config)}
    write_llama_cpp(tmp_path / "nano.gguf", config, made)
    write_ollama(tmp_path / "blob", config, made)
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 1900, (n,), generator=random).tolist() for n in (1, 20, 200, 300)]
    expected = greedy("oscine-nano", prompts)
    assert greedy(str(tmp_path / "nano.gguf"), prompts) == expected
    assert greedy(str(tmp_path / "blob"), prompts) == expected


# ---- types of blocks ----


@pytest.mark.long
@pytest.mark.parametrize("name", READ)
def test_blocks_are_read_as_ggml_reads_them(name: str) -> None:
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    raw = np.random.default_rng(0).integers(0, 256, (6, 5 * kind.bytes), dtype=np.uint8)
    theirs = torch.from_numpy(gguf.quants.dequantize(raw, Quantization[name]))
    with mmap.mmap(-1, raw.nbytes) as data:
        data[:] = raw.tobytes()
        ours = floats(Stored("t", (6, 5 * kind.values), kind, data, 0))
    # Random halves may be infinite or no numbers; sums and products of three may be rounded in another order.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_block_sizes_equal_ggmls() -> None:
    for number, kind in TYPES.items():
        if number != 4:
            assert gguf.GGML_QUANT_SIZES[Quantization(number)] == (kind.values, kind.bytes)
            assert Quantization(number).name == kind.name


@pytest.mark.parametrize("kind", [Quantization.Q8_0, Quantization.F16, Quantization.F32, Quantization.Q5_1])
def test_dense_weights_in_other_types(tmp_path: Path, kind: Quantization) -> None:
    made = tensors(CONFIG)
    write_llama_cpp(tmp_path / "m.gguf", CONFIG, made, types=lambda name: kind)
    found = opened(tmp_path / "m.gguf")
    for name in ("lm_head.weight", "model.layers.2.self_attn.k_proj.weight"):
        expected = gguf.quants.dequantize(gguf.quants.quantize(made[name].float().numpy(), kind), kind)
        torch.testing.assert_close(found.get(name), torch.from_numpy(expected), rtol=1e-6, atol=1e-7)


def test_a_quantised_embedding_takes_two_bytes_per_value(tmp_path: Path) -> None:
    made = tensors(CONFIG)
    write_llama_cpp(tmp_path / "m.gguf", CONFIG, made, types=lambda name: Quantization.Q8_0)
    found = opened(tmp_path / "m.gguf").get("model.embed_tokens.weight")
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, made["model.embed_tokens.weight"], rtol=0.02, atol=0.001)


def resident() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


@pytest.mark.long
def test_read_tensors_are_released_from_memory(tmp_path: Path) -> None:
    config = replace(CONFIG, hidden_size=512, intermediate_size=512, num_local_experts=16)
    write_llama_cpp(tmp_path / "m.gguf", config, tensors(config), types=lambda name: Quantization.Q8_0)
    assert (size := (tmp_path / "m.gguf").stat().st_size) > 20_000_000
    found, before = opened(tmp_path / "m.gguf"), resident()
    for name in tensor_specs(config):
        found.get(name)
    assert resident() - before < size / 4


# ---- experts in other types than MXFP4 ----

WIDE = replace(CONFIG, hidden_size=256, intermediate_size=256, num_local_experts=4)
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}  # bytes at which scales begin


def encoded(kind: Quantization) -> Encode:
    """By ggml's own package; random blocks with sensible scales of the types that it does not write."""

    def encode(values: NDArray[np.float32]) -> tuple[NDArray[Any], Quantization]:
        if kind.name not in HALVES:
            return gguf.quants.quantize(values, kind), kind
        per_block, size = gguf.GGML_QUANT_SIZES[kind]
        random = np.random.default_rng(values.shape[1])
        raw = random.integers(0, 256, (*values.shape[:-1], values.shape[-1] // per_block, size), dtype=np.uint8)
        for at in HALVES[kind.name]:
            scales = random.uniform(1e-4, 1e-3, raw.shape[:-1]).astype(np.float16)
            raw[..., at : at + 2] = scales[..., None].view(np.uint8)
        return raw.reshape(*values.shape[:-1], -1), kind

    return encode


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_0", "Q5_1", "Q5_K", "Q4_0", "Q4_1", "Q4_K", "IQ4_NL"]
)
def test_experts_of_other_types_are_quantised_as_they_are_read(tmp_path: Path, kind: str) -> None:
    """To the values nearest to those that ggml's own package reads."""
    path, made = tmp_path / "m.gguf", tensors(WIDE)
    write_llama_cpp(path, WIDE, made, experts=encoded(Quantization[kind]))
    found = opened(path)
    theirs = {one.name: one for one in gguf.GGUFReader(path).tensors}
    for matrix, halves in (("gate_up", ("gate", "up")), ("down", ("down",))):
        raw = [theirs[f"blk.1.ffn_{half}_exps.weight"] for half in halves]
        values = [torch.tensor(gguf.quants.dequantize(one.data, one.tensor_type)) for one in raw]
        (blocks, scales), error = quantize(torch.stack(values, dim=2).flatten(1, 2))
        name = f"model.layers.1.mlp.experts.{matrix}_proj"
        read = dequantize(*(found.get(f"{name}_{part}") for part in ("blocks", "scales")))
        assert (read - dequantize(blocks, scales)).norm() < 1e-3 * read.norm()  # some sums are rounded differently
        assert found.errors[name].relative == pytest.approx(error.relative, rel=0.01)
        assert torch.equal(found.get(f"{name}_bias"), made[f"{name}_bias"].float())
    if kind in ("F32", "F16", "BF16"):
        assert {error.relative for error in found.errors.values()} == {0}


def test_experts_that_are_not_finite_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def broken(values: NDArray[np.float32]) -> tuple[NDArray[Any], Quantization]:
        raw, kind = encoded(Quantization.Q8_0)(values)
        raw[1, 2, :2] = np.array([np.nan], np.float16).view(np.uint8)
        return raw, kind

    write_llama_cpp(path, CONFIG, tensors(CONFIG), experts=broken)
    with pytest.raises(ValueError, match=r"m\.gguf: blk\.1\.ffn_down_exps\.weight: a weight is not finite"):
        opened(path).get("model.layers.1.mlp.experts.down_proj_scales")


# ---- refusals ----


def refusal(path: Path) -> str:
    with pytest.raises(ValueError) as error:
        opened(path)
    return str(error.value)


def test_a_type_that_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    config = replace(CONFIG, hidden_size=256, intermediate_size=256)
    write_llama_cpp(path, config, tensors(config))
    renumber(path, "blk.3.attn_q.weight", 10)
    assert refusal(path).startswith(
        f"{path}: blk.3.attn_q.weight has type Q2_K; it must be one of F32, F16, BF16, Q8_0"
    )


def test_experts_of_another_type(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_llama_cpp(path, CONFIG, tensors(CONFIG))
    renumber(path, "blk.2.ffn_up_exps.weight", 16)
    said = f"{path}: blk.2.ffn_up_exps.weight has type IQ2_XXS; it must be one of MXFP4, F32, F16, BF16, Q8_0, Q4_0, "
    assert refusal(path).startswith(said)
    assert refusal(path).endswith(": `llama-quantize --allow-requantize IN OUT Q8_0` of llama.cpp converts it")


def renumber(path: Path, name: str, number: int) -> None:
    """Changes the type of a tensor in a file."""
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    (count,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at + 4 + 8 * count, number)
    path.write_bytes(data)


def test_tensors_that_are_missing_too_many_or_misshapen(tmp_path: Path) -> None:
    made, path = tensors(CONFIG), tmp_path / "m.gguf"
    without = {name: tensor for name, tensor in made.items() if name != "model.layers.2.self_attn.k_proj.bias"}
    write_llama_cpp(path, CONFIG, without)
    assert refusal(path) == f"{path}: blk.2.attn_k.bias is missing"
    write_llama_cpp(path, CONFIG, made | {"surplus.weight": torch.zeros(3)})
    assert refusal(path) == f"{path}: surplus.weight is not a tensor of this configuration"
    write_llama_cpp(path, CONFIG, made | {"model.norm.weight": torch.zeros(3)})
    assert refusal(path) == f"{path}: output_norm.weight has shape [3], not [96]"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("gpt-oss.block_count", None, "gpt-oss.block_count is missing"),
        ("gpt-oss.expert_count", "many", "gpt-oss.expert_count must be an integer, not 'many'"),
        ("gpt-oss.attention.head_count", True, "gpt-oss.attention.head_count must be an integer, not True"),
        ("gpt-oss.rope.freq_base", None, "gpt-oss.rope.freq_base is missing"),
        ("gpt-oss.rope.scaling.type", "linear", "gpt-oss.rope.scaling.type must be 'yarn', not 'linear'"),
        ("gpt-oss.attention.value_length", 32, "gpt-oss.attention.value_length must be 64, not 32"),
        ("gpt-oss.attention.head_count", 7, "num_attention_heads must be a multiple of num_key_value_heads (2), not 7"),
        ("gpt-oss.rope.scaling.factor", 0.5, "rope_scaling.factor must be at least 1, not 0.5"),
        ("general.architecture", "llama", "general.architecture must be gpt-oss, not 'llama'"),
        ("tokenizer.ggml.tokens", None, "tokenizer.ggml.tokens is missing, or no list of strings"),
        ("gpt-oss.vocab_size", 7, "gpt-oss.vocab_size must be 211, not 7"),
    ],
)
def test_a_key_that_is_missing_or_wrong(written: Path, key: str, value: object, said: str) -> None:
    file = Gguf(written)
    file.metadata = {k: v for k, v in file.metadata.items() if k != key} | ({} if value is None else {key: value})
    with pytest.raises(ValueError) as error:
        config_of(file)
    assert str(error.value) == f"{written}: {said}"


@pytest.mark.parametrize("pattern", [{}, {"gpt-oss.attention.sliding_window_pattern": 3}], ids=["none", "period"])
def test_more_layers_than_memory_holds_are_refused_at_once(written: Path, pattern: dict[str, int]) -> None:
    file = Gguf(written)
    file.metadata |= {"gpt-oss.block_count": 1 << 62} | pattern
    with pytest.raises(ValueError, match="num_hidden_layers must be at most 4096"):
        config_of(file)


@pytest.mark.parametrize("pattern", [3, [True, True, False, True]])
def test_layers_with_windows_by_a_pattern(written: Path, pattern: object) -> None:
    file = Gguf(written)
    file.metadata["gpt-oss.attention.sliding_window_pattern"] = pattern
    sliding = [kind == "sliding_attention" for kind in config_of(file).layer_types]
    assert sliding == [True, True, False, True]


@pytest.mark.parametrize("keep", [0, 3, 10, 200, 5000, -1])
def test_a_truncated_file(written: Path, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(written.read_bytes()[:keep])
    assert refusal(path).startswith(f"{path}: truncated or malformed: ")


@pytest.mark.long
def test_hostile_headers_are_one_error(written: Path, tmp_path: Path) -> None:
    """Any byte of the header may be anything."""
    path, whole, errors = tmp_path / "m.gguf", written.read_bytes(), list[str]()
    random = np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(whole)
        for at in random.integers(4, 8000, 3):
            data[at] = random.integers(256)
        path.write_bytes(data)
        try:
            opened(path)
        except ValueError as error:  # nothing else
            errors.append(str(error))
    assert len(errors) > 100
    assert all(error.startswith(f"{path}: ") for error in errors)


# ---- names ----


def test_a_vocabulary_needs_a_tokenizer_of_its_own(written: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"model\.gguf: its vocabulary is not gpt-oss's .*; --tokenizer names a folder"
    ):
        hub.check_model(ModelOptions(str(written)))
    (tmp_path / "m.gguf").symlink_to(written)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert hub.check_model(ModelOptions(str(tmp_path))) == tmp_path
    assert open_model(ModelOptions(str(tmp_path))).tokenizer == tmp_path


@pytest.mark.long
def test_gpt_oss_s_own_vocabulary_is_known(tmp_path: Path) -> None:
    config, path = replace(CONFIG, vocab_size=NUM_TOKENS, hidden_size=32), tmp_path / "m.gguf"
    tokens = [f"t{i}" for i in range(NUM_TOKENS)]
    for token, number in SPECIAL_IDS.items():
        tokens[number] = token
    write_llama_cpp(path, config, tensors(config), tokens=tokens)
    assert hub.check_model(ModelOptions(str(path))).name == "o200k_harmony"
    path.write_bytes(path.read_bytes().replace(b"<|start|>", b"<|start>|"))
    with pytest.raises(ValueError, match="not gpt-oss's"):
        hub.check_model(ModelOptions(str(path)))


def test_a_folder_with_several_models(written: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).symlink_to(written)
    with pytest.raises(ValueError, match=r"holds several GGUF files; name one: a\.gguf, b\.gguf"):
        hub.find_model(ModelOptions(str(tmp_path)))


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("GG")
    with pytest.raises(ValueError, match=r"notes\.txt' is a file, and not a GGUF file"):
        hub.find_model(ModelOptions(str(tmp_path / "notes.txt")))
