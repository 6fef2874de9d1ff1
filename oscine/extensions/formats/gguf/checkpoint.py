"""The tensors of a gpt-oss model in a GGUF file, under their published names.

llama.cpp has a tensor each for queries, keys and values, and for the rows of gate and up. The first files of Ollama
have one for each of these, with gate and up interleaved as published, and a few other names.
"""

import mmap
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from oscine.extensions.formats.gguf.blocks import DENSE, EXPERTS, floats, mxfp4_blocks, mxfp4_scales
from oscine.extensions.formats.gguf.file import Gguf, Stored
from oscine.model.config import ModelConfig
from oscine.model.tensors import tensor_specs
from oscine.system.model_files import shown

_EMBEDDING = "model.embed_tokens.weight"
# The end of a published name -> that of the stored one, by llama.cpp and where it differs by Ollama.
_NAMES = {
    _EMBEDDING: ("token_embd.weight",),
    "model.norm.weight": ("output_norm.weight",),
    "lm_head.weight": ("output.weight",),
    "input_layernorm.weight": ("attn_norm.weight",),
    "self_attn.o_proj.weight": ("attn_output.weight", "attn_out.weight"),
    "self_attn.o_proj.bias": ("attn_output.bias", "attn_out.bias"),
    "self_attn.sinks": ("attn_sinks.weight", "attn_sinks"),
    "post_attention_layernorm.weight": ("post_attention_norm.weight", "ffn_norm.weight"),
    "mlp.router.weight": ("ffn_gate_inp.weight",),
    "mlp.router.bias": ("ffn_gate_inp.bias",),
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_PROJECTION = re.compile(r"self_attn\.([qkv])_proj\.(weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.(gate_up|down)_proj_(blocks|scales|bias)")


class GgufCheckpoint:
    """Raises ValueError if any tensor is missing, misshapen, of a type that is not read, or not of this model."""

    def __init__(self, file: Gguf, config: ModelConfig) -> None:
        self._file, self._config = file, config
        wanted: dict[str, tuple[int, ...]] = {}
        for published, spec in tensor_specs(config).items():
            wanted |= self._stored_shapes(published, spec.shape)
        for name in file.tensors:
            if name not in wanted:
                raise ValueError(f"{file.path}: {shown(name)} is not a tensor of this configuration")
        for name, shape in wanted.items():
            self._check(name, shape)

    def get(self, name: str) -> Tensor:
        """Floats in bfloat16 or float32, as the file has them. What has other types becomes float32.

        An embedding of other types becomes bfloat16: it is the one matrix that is kept as it is given.
        """
        layer, end = _split(name)
        if found := _EXPERT.fullmatch(end):
            return self._experts(layer, *found.groups())
        if (found := _PROJECTION.fullmatch(end)) and self._is_fused(layer):
            rows = dict(zip("qkv", self._qkv_rows(), strict=True))[found[1]]
            return floats(self._stored(f"{layer}attn_qkv.{found[2]}"))[rows.start : rows.stop]
        return floats(self._stored(*self._names(layer, end)), torch.bfloat16 if name == _EMBEDDING else torch.float32)

    def _experts(self, layer: str, matrix: str, part: str) -> Tensor:
        stored = [self._stored(name) for name in self._expert_names(layer, matrix, part)]
        if part == "blocks":
            return mxfp4_blocks(*stored)
        tensors = [mxfp4_scales(one) if part == "scales" else floats(one) for one in stored]
        return tensors[0] if len(tensors) == 1 else torch.stack(tensors, dim=2).flatten(1, 2)

    # ---- names ----

    def _names(self, layer: str, end: str) -> tuple[str, ...]:
        """All spellings of a published tensor that is stored as one."""
        if found := _PROJECTION.fullmatch(end):
            return (f"{layer}attn_{found[1]}.{found[2]}",)
        return tuple(layer + name for name in _NAMES[end])

    def _expert_names(self, layer: str, matrix: str, part: str) -> list[str]:
        end = "bias" if part == "bias" else "weight"
        fused = f"{layer}ffn_{matrix}_exps.{end}"
        split = [f"{layer}ffn_{half}_exps.{end}" for half in ("gate", "up")]
        return [fused] if matrix == "down" or fused in self._file.tensors else split

    def _is_fused(self, layer: str) -> bool:
        return f"{layer}attn_qkv.weight" in self._file.tensors

    def _qkv_rows(self) -> list[range]:
        config = self._config
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        return [range(queries), range(queries, queries + keys), range(queries + keys, queries + 2 * keys)]

    def _stored(self, *names: str) -> Stored:
        """The tensor with the first of these names that the file has."""
        return self._file.tensors[next(name for name in names if name in self._file.tensors)]

    # ---- checks ----

    def _stored_shapes(self, published: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the stored tensors that hold a published one. MXFP4 blocks and scales are one tensor."""
        layer, end = _split(published)
        if found := _EXPERT.fullmatch(end):
            names = self._expert_names(layer, *found.groups())
            experts, rows, *rest = shape
            columns = [] if found[2] == "bias" else [rest[0] * 32]
            return {name: (experts, rows // len(names), *columns) for name in names}
        if (found := _PROJECTION.fullmatch(end)) and self._is_fused(layer):
            return {f"{layer}attn_qkv.{found[2]}": (self._qkv_rows()[-1].stop, *shape[1:])}
        spellings = self._names(layer, end)
        return {next((name for name in spellings if name in self._file.tensors), spellings[0]): shape}

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        path, stored = self._file.path, self._file.tensors.get(name)
        if stored is None:
            raise ValueError(f"{path}: {name} is missing")
        if stored.shape != shape:
            raise ValueError(f"{path}: {name} has shape {list(stored.shape)}, not {list(shape)}")
        packed = name.endswith("_exps.weight")
        kind, allowed = stored.type.name, EXPERTS if packed else DENSE
        if kind not in allowed:
            what = "experts must be MXFP4" if packed else f"it must be one of {', '.join(DENSE)}"
            raise ValueError(f"{path}: {name} has type {kind}; {what}")
        if shape[-1] % stored.type.values:
            raise ValueError(
                f"{path}: {name} has rows of {shape[-1]}, which is no multiple of the block size of {kind}"
            )


def raw_tensors(file: Gguf) -> Iterator[tuple[str, Tensor]]:
    """The bytes of each tensor. Nothing is read ahead."""
    for name, stored in file.tensors.items():
        stored.data.madvise(mmap.MADV_RANDOM)
        yield name, torch.from_numpy(stored.raw)


def _split(name: str) -> tuple[str, str]:
    """Splits a published name into the prefix of the stored name and the end, which is the same in all layers."""
    found = _LAYER.fullmatch(name)
    return (f"blk.{found[1]}.", found[2]) if found else ("", name)
