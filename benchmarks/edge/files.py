"""GGUF files that both systems load: random weights at the shapes of gpt-oss-20b, and the embedded model."""

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from oscine.checkpoint.folder import Checkpoint
from oscine.checkpoint.hub import NANO_FOLDER
from oscine.model.config import ModelConfig, gpt_oss_20b
from oscine.model.o200k import o200k_folder
from oscine.model.tensors import tensor_specs
from tests.model.gguf_files import Quantization, describe_for_llama_cpp, finish, write_llama_cpp

_SPECIAL, _ORDINARY = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
_SCALES = 118, 122  # E8M0 exponents, [low, high), as in Oscine's own random weights
_STEP = 0.02 / 73  # scale in Q8_0: values that are uniform from -127 to 127 get a standard deviation of 0.02


def embedded(folder: Path) -> Path:
    """The embedded model with dense weights in bfloat16."""
    path = folder / "nano.gguf"
    if not path.exists():
        config = ModelConfig.from_file(NANO_FOLDER / "config.json")
        checkpoint = Checkpoint(NANO_FOLDER, config)
        tensors = {name: checkpoint.get(name) for name in tensor_specs(config)}
        write_llama_cpp(path, config, tensors, tokens=_tokens(NANO_FOLDER), change=lambda w: _add_bpe(w, NANO_FOLDER))
        (folder / "tokenizer.json").write_bytes((NANO_FOLDER / "tokenizer.json").read_bytes())
    return path


def published(folder: Path, num_layers: int) -> Path:
    """Random weights at the shapes of 20b's first layers: experts in MXFP4, matrices in Q8_0, the rest float32.

    Every layer has its own copy of the same values.
    """
    path = folder / f"20b-{num_layers}-layers.gguf"
    if path.exists():
        return path
    config = gpt_oss_20b().of_layers(range(num_layers))
    config = replace(config, sliding_window=128, num_local_experts=32)
    vocabulary, partial = o200k_folder(), path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "gpt-oss")
    describe_for_llama_cpp(writer, config, _tokens(vocabulary))
    _add_bpe(writer, vocabulary)
    random, queries = np.random.default_rng(0), config.num_attention_heads * config.head_dim
    keys, hidden, inner = config.num_key_value_heads * config.head_dim, config.hidden_size, config.intermediate_size
    embedding = _q8_0(random, config.vocab_size, hidden)
    layer = {
        "attn_norm.weight": np.ones(hidden, np.float32),
        "attn_q.weight": _q8_0(random, queries, hidden),
        "attn_q.bias": _vector(random, queries),
        "attn_k.weight": _q8_0(random, keys, hidden),
        "attn_k.bias": _vector(random, keys),
        "attn_v.weight": _q8_0(random, keys, hidden),
        "attn_v.bias": _vector(random, keys),
        "attn_output.weight": _q8_0(random, hidden, queries),
        "attn_output.bias": _vector(random, hidden),
        "attn_sinks.weight": _vector(random, config.num_attention_heads),
        "post_attention_norm.weight": np.ones(hidden, np.float32),
        "ffn_gate_inp.weight": _vector(random, 32, hidden) / 5,
        "ffn_gate_inp.bias": _vector(random, 32),
        "ffn_gate_exps.weight": _mxfp4(random, 32, inner, hidden),
        "ffn_gate_exps.bias": _vector(random, 32, inner),
        "ffn_up_exps.weight": _mxfp4(random, 32, inner, hidden),
        "ffn_up_exps.bias": _vector(random, 32, inner),
        "ffn_down_exps.weight": _mxfp4(random, 32, hidden, inner),
        "ffn_down_exps.bias": _vector(random, 32, hidden),
    }
    _add(writer, "token_embd.weight", embedding)
    _add(writer, "output.weight", embedding)
    _add(writer, "output_norm.weight", np.ones(hidden, np.float32))
    for index in range(num_layers):
        for name, values in layer.items():
            _add(writer, f"blk.{index}.{name}", values)
    finish(writer)
    return partial.rename(path)


def _add(writer: gguf.GGUFWriter, name: str, values: NDArray[np.generic]) -> None:
    kind = None
    if values.dtype == np.uint8:
        kind = Quantization.MXFP4 if "_exps" in name else Quantization.Q8_0
    writer.add_tensor(name, values, raw_dtype=kind)


def _vector(random: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return random.standard_normal(shape, np.float32) / 10


def _q8_0(random: np.random.Generator, rows: int, columns: int) -> NDArray[np.uint8]:
    blocks = np.empty((rows, columns // 32, 34), np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(_STEP).tobytes(), np.uint8)
    blocks[..., 2:] = random.integers(-127, 128, (rows, columns // 32, 32), np.int8).view(np.uint8)
    return blocks.reshape(rows, -1)


def _mxfp4(random: np.random.Generator, experts: int, rows: int, columns: int) -> NDArray[np.uint8]:
    blocks = np.empty((experts, rows, columns // 32, 17), np.uint8)
    blocks[..., 0] = random.integers(*_SCALES, blocks.shape[:-1], np.uint8)
    blocks[..., 1:] = random.integers(0, 256, (*blocks.shape[:-1], 16), np.uint8)
    return blocks.reshape(experts, rows, -1)


def _tokens(folder: Path) -> list[str]:
    return [token for _, token in sorted(_ids(folder).items())]


def _ids(folder: Path) -> dict[int, str]:
    """A name for every id of the embedding, also for ids without a token."""
    content = json.loads((folder / "tokenizer.json").read_bytes())
    found = {number: token for token, number in content["model"]["vocab"].items()}
    found |= {token["id"]: token["content"] for token in content["added_tokens"]}
    size = 1920 if folder == NANO_FOLDER else 201088
    return {number: found.get(number, f"<|unused_{number}|>") for number in range(size)}


def _add_bpe(writer: gguf.GGUFWriter, folder: Path) -> None:
    """The keys beside the tokens that llama.cpp's tokenizer needs."""
    content = json.loads((folder / "tokenizer.json").read_bytes())
    ordinary = set(content["model"]["vocab"].values()) - {token["id"] for token in content["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-4o")
    writer.add_token_types([_ORDINARY if number in ordinary else _SPECIAL for number in _ids(folder)])
    writer.add_token_merges(merges)
