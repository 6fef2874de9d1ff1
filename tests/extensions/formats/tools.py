"""Folders of models as other tools write them, by their documented names: made from published tensors.

Values are encoded here by plain arithmetic. What a tool's values mean is in its documentation; each encoder returns
also the values that its codes mean.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from oscine.checkpoint.hub import CONFIG, SINGLE
from oscine.model.config import ModelConfig
from oscine.ops.moe.mxfp4 import dequantize

Tensors = dict[str, Tensor]
Encoded = tuple[Tensors, Tensor]  # parts after the name of a module, and the values that they mean
Encode = Callable[[Tensor], Encoded]  # of [..., out, in]
NF4 = torch.tensor(  # the table of QLoRA
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ]
)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
MATRIX = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


def write(folder: Path, config: ModelConfig, tensors: Tensors, quantization: object = None, files: int = 1) -> Path:
    """Several files have the names of shards, and no index."""
    folder.mkdir(parents=True, exist_ok=True)
    values = config.to_dict() | {"quantization_config": quantization}
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    names = [SINGLE] if files == 1 else [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    for number, name in enumerate(names):
        own = {key: tensors[key].clone(memory_format=torch.contiguous_format) for key in sorted(tensors)[number::files]}
        save_file(own, folder / name, metadata={"format": "pt"})
    return folder


def values_of(published: Tensors) -> Tensors:
    """Experts as values in bfloat16 [experts, out, in], under the names of their matrices; all else as it is."""
    found = {}
    for name, tensor in published.items():
        if name.endswith("_blocks"):
            matrix = name.removesuffix("_blocks")
            found[matrix] = dequantize(tensor, published[f"{matrix}_scales"]).bfloat16()
        elif not name.endswith("_scales"):
            found[name] = tensor
    return found


# ---- encodings ----


def floats(weight: Tensor) -> Encoded:
    return {".weight": weight}, weight


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """Indices in a table."""
    return (values[..., None] - table).abs().argmin(-1)


def nibbles(codes: Tensor) -> Tensor:
    """Two codes in a byte, that of the lower index in the low nibble."""
    codes = codes.to(torch.uint8)
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def nf4(weight: Tensor) -> Encoded:
    """bitsandbytes with double quantisation. The value of the lower index is in the high nibble."""
    blocks = weight.float().reshape(-1, 64)
    largest = blocks.abs().amax(-1)
    offset = float(largest.mean())
    table = torch.linspace(-1, 1, 256)
    padded = torch.cat((largest - offset, torch.zeros(-len(largest) % 256))).view(-1, 256)
    nested = padded.abs().amax(-1)
    codes = torch.searchsorted(table, (padded / nested[:, None].clamp(min=1e-9)).flatten()[: len(largest)]).clamp(
        0, 255
    )
    means = table[codes] * nested.repeat_interleave(256)[: len(codes)] + offset
    indices = nearest(blocks / means[:, None], NF4)
    packed = nibbles(indices.flatten())
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    parts = {
        ".weight": ((packed >> 4) | (packed << 4)).view(-1, 1),
        ".weight.absmax": codes.to(torch.uint8),
        ".weight.quant_map": NF4,
        ".weight.nested_absmax": nested,
        ".weight.nested_quant_map": table,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return parts, (NF4[indices] * means[:, None]).view(weight.shape)


def nf4_plain(weight: Tensor) -> Encoded:
    blocks = weight.float().reshape(-1, 64)
    largest = blocks.abs().amax(-1)
    indices = nearest(blocks / largest[:, None].clamp(min=1e-9), NF4)
    packed = nibbles(indices.flatten())
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    parts = {
        ".weight": ((packed >> 4) | (packed << 4)).view(-1, 1),
        ".weight.absmax": largest,
        ".weight.quant_map": NF4,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return parts, (NF4[indices] * largest[:, None]).view(weight.shape)


def int8_of_bitsandbytes(weight: Tensor) -> Encoded:
    largest = weight.float().abs().amax(-1)
    codes = (weight.float() / largest[..., None] * 127).round().to(torch.int8)
    parts = {".weight": codes, ".SCB": largest, ".weight_format": torch.zeros((), dtype=torch.uint8)}
    return parts, codes.float() * largest[..., None] / 127


def fp8(scale_of: Callable[[Tensor], Tensor], name: str = ".weight_scale") -> Encode:
    """`scale_of`: of the magnitudes, a scale that broadcasts."""

    def encode(weight: Tensor) -> Encoded:
        scale = scale_of(weight.float().abs()) / 448
        codes = (weight.float() / whole(scale, weight)).to(torch.float8_e4m3fn)
        return {".weight": codes, name: scale}, codes.float() * whole(scale, weight)

    return encode


def whole(scale: Tensor, weight: Tensor) -> Tensor:
    """A scale for each value, of one per tile of 128 rows and columns."""
    if scale.dim() != weight.dim() or scale.shape[-2:] == (weight.shape[-2], 1):
        return scale
    rows, columns = weight.shape[-2:]
    return scale.repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]


def of_rows(magnitudes: Tensor) -> Tensor:
    return magnitudes.amax(-1, keepdim=True)


def of_tiles(magnitudes: Tensor) -> Tensor:
    rows, columns = magnitudes.shape[-2:]
    padded = torch.nn.functional.pad(magnitudes, (0, -columns % 128, 0, -rows % 128))
    return padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)).amax((-1, -3))


def mxfp8(weight: Tensor) -> Encoded:
    blocks = weight.float().unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(-1).clamp(min=2**-60).log2().floor().int() - 8
    codes = torch.ldexp(blocks, -exponents[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    parts = {".weight": codes.flatten(-2), ".weight_scale": (exponents + 127).to(torch.uint8)}
    return parts, torch.ldexp(codes.float(), exponents[..., None]).flatten(-2)


def nvfp4(weight: Tensor, main: str = ".weight", whole_name: str = ".weight_scale_2") -> Encoded:
    """As ModelOpt names it. compressed-tensors stores the reciprocal of the scale of all."""
    blocks = weight.float().unflatten(-1, (-1, 16))
    largest = blocks.abs().amax(-1)
    for_all = largest.max() / (6 * 448)
    scales = (largest / 6 / for_all).to(torch.float8_e4m3fn)
    steps = (scales.float() * for_all)[..., None]
    codes = nearest(blocks / steps.clamp(min=1e-12), E2M1)
    stored = for_all if whole_name == ".weight_scale_2" else for_all.reciprocal()[None]
    parts = {main: nibbles(codes.flatten(-2)), ".weight_scale": scales, whole_name: stored}
    parts[".input_scale" if whole_name == ".weight_scale_2" else ".input_global_scale"] = torch.ones(())
    return parts, (E2M1[codes] * steps).flatten(-2)


def nvfp4_of_compressed_tensors(weight: Tensor) -> Encoded:
    return nvfp4(weight, ".weight_packed", ".weight_global_scale")


def bit_stream(codes: Tensor, bits: int) -> Tensor:
    """The lowest bits first, as 32-bit words."""
    stream = ((codes[..., None].int() >> torch.arange(bits)) & 1).flatten(-2).unflatten(-1, (-1, 8))
    octets = (stream << torch.arange(8)).sum(-1).to(torch.uint8)
    return octets.contiguous().view(torch.int32)


def affine(bits: int, group: int) -> Encode:
    """Of mlx-lm."""

    def encode(weight: Tensor) -> Encoded:
        groups = weight.float().unflatten(-1, (-1, group))
        least, most = groups.amin(-1), groups.amax(-1)
        scales = ((most - least) / ((1 << bits) - 1)).bfloat16()
        biases = least.bfloat16()
        codes = (groups - biases.float()[..., None]) / scales.float()[..., None].clamp(min=1e-12)
        codes = codes.round().clamp(0, (1 << bits) - 1)
        words = bit_stream(codes.flatten(-2), bits).view(torch.uint32)
        meant = codes * scales.float()[..., None] + biases.float()[..., None]
        return {".weight": words, ".scales": scales, ".biases": biases}, meant.flatten(-2)

    return encode


def integers(weight: Tensor) -> Encoded:
    """compressed-tensors' pack-quantized, symmetric, in groups of 32."""
    groups = weight.float().unflatten(-1, (-1, 32))
    scales = (groups.abs().amax(-1) / 7).bfloat16()
    codes = (groups / scales.float()[..., None].clamp(min=1e-12)).round().clamp(-8, 7)
    parts = {".weight_packed": bit_stream(codes.flatten(-2) + 8, 4), ".weight_scale": scales}
    return parts | {".weight_shape": torch.tensor(weight.shape)}, (codes * scales.float()[..., None]).flatten(-2)


# ---- layouts ----


def experts_of(published: Tensors) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Matrix, its values [experts, out, in], its bias."""
    for name, tensor in values_of(published).items():
        if name.endswith(MATRIX):
            yield name, tensor, published[f"{name}_bias"]


def rest_of(published: Tensors) -> Tensors:
    return {name: tensor for name, tensor in published.items() if ".experts." not in name}


def dense(tensors: Tensors, encode: Encode, ends: tuple[str, ...]) -> tuple[Tensors, Tensors]:
    """Encodes the matrices whose names have these ends. The values by their published names come second."""
    made, meant = {}, {}
    for name, tensor in tensors.items():
        if name.endswith(ends):
            parts, meant[name] = encode(tensor)
            made |= {name.removesuffix(".weight") + part: value for part, value in parts.items()}
        else:
            made[name] = tensor
    return made, meant


def apart(
    published: Tensors, encode: Encode, naming: Callable[[str, int], Mapping[str, slice]]
) -> tuple[Tensors, Tensors]:
    """Experts apart. `naming`: the modules of a matrix and an expert, with the rows that they have."""
    made, meant = dict[str, Tensor](), dict[str, Tensor]()
    for matrix, weight, bias in experts_of(published):
        meant[matrix] = torch.empty(weight.shape)
        for index in range(len(weight)):
            for module, rows in naming(matrix, index).items():
                parts, meant[matrix][index, rows] = encode(weight[index, rows])
                made |= {module + part: value for part, value in parts.items()} | {f"{module}.bias": bias[index, rows]}
    return made, meant


EVEN, ODD, ALL = slice(0, None, 2), slice(1, None, 2), slice(None)


def of_unsloth(matrix: str, index: int) -> Mapping[str, slice]:
    return {f"{matrix}s.{index}": ALL}


def of_compressor(matrix: str, index: int) -> Mapping[str, slice]:
    prefix, which = matrix.rsplit(".", 1)
    halves = {"gate_proj": EVEN, "up_proj": ODD} if which == "gate_up_proj" else {"down_proj": ALL}
    return {f"{prefix}.{index}.{name}": rows for name, rows in halves.items()}


def of_quark(matrix: str, index: int) -> Mapping[str, slice]:
    prefix, which = matrix.rsplit(".", 1)
    return {f"{prefix}.{index}.{which}": ALL}


def unsloth(published: Tensors, encode: Encode = floats) -> tuple[Tensors, Tensors]:
    experts, meant = apart(published, encode, of_unsloth)
    return experts | {
        name.replace(".router.", ".router.linear."): one for name, one in rest_of(published).items()
    }, meant


def mlx(published: Tensors, encode: Encode | None = None) -> tuple[Tensors, Tensors]:
    """Gate and up apart, all experts together. Without `encode`, the experts stay in MXFP4."""
    made, meant = rest_of(published), dict[str, Tensor]()
    for matrix, weight, bias in experts_of(published):
        prefix, which = matrix.rsplit(".", 1)
        meant[matrix] = weight.float().clone()
        for name, rows in (
            {"gate_proj": EVEN, "up_proj": ODD} if which == "gate_up_proj" else {"down_proj": ALL}
        ).items():
            module = f"{prefix}.{name}"
            if encode is None:
                blocks, scales = (published[f"{matrix}_{part}"][:, rows] for part in ("blocks", "scales"))
                made |= {
                    f"{module}.weight": blocks.flatten(-2).contiguous().view(torch.uint32),
                    f"{module}.scales": scales,
                }
            else:
                parts, meant[matrix][:, rows] = encode(weight[:, rows])
                made |= {module + part: value for part, value in parts.items()}
            made[f"{module}.bias"] = bias[:, rows]
    return made, meant


def modelopt(published: Tensors, encode: Encode) -> tuple[Tensors, Tensors]:
    """All experts together, parts with the last two dimensions swapped."""
    made, meant = rest_of(published), {}
    for matrix, weight, bias in experts_of(published):
        parts, meant[matrix] = encode(weight)
        made[f"{matrix}_bias"] = bias
        for part, value in parts.items():
            made[matrix + part.removesuffix(".weight").replace(".", "_")] = value.mT if value.dim() == 3 else value
    return made, meant


def transformers(published: Tensors) -> Tensors:
    made = {name: one for name, one in published.items() if not name.endswith(("_blocks", "_scales"))}
    return made | {matrix: weight.mT for matrix, weight, _ in experts_of(published)}


def mxfp4(main: str) -> Callable[[Tensors], Tensors]:
    """Experts apart, with the blocks and scales as they are."""

    def layout(published: Tensors) -> Tensors:
        made, naming = rest_of(published), of_quark if main == "weight" else of_compressor
        for matrix, weight, bias in experts_of(published):
            blocks, scales = (published[f"{matrix}_{part}"] for part in ("blocks", "scales"))
            for index in range(len(weight)):
                for module, rows in naming(matrix, index).items():
                    made |= {f"{module}.{main}": blocks[index, rows].flatten(-2), f"{module}.bias": bias[index, rows]}
                    made |= {f"{module}.weight_scale": scales[index, rows], f"{module}.input_scale": torch.ones(())}
        return made

    return layout


def prefixed(prefix: str, layout: Callable[[Tensors], Tensors] = dict) -> Callable[[Tensors], Tensors]:
    return lambda published: {prefix + name: one for name, one in layout(published).items()}


def inside(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda published: {name.replace(old, new): one for name, one in published.items()}


BITSANDBYTES: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
# Of each layout in which nothing is lost: the tensors, and quantization_config.
LOSSLESS: dict[str, tuple[Callable[[Tensors], Tensors], object]] = {
    "Unsloth, 16 bits": (lambda made: unsloth(made)[0], None),
    "transformers": (transformers, None),
    "torch.compile": (prefixed("_orig_mod."), {"quant_method": "mxfp4"}),
    "torch.compile of a fine-tune": (prefixed("_orig_mod.", transformers), None),
    "FSDP": (inside("model.layers.", "model.layers._fsdp_wrapped_module."), {"quant_method": "mxfp4"}),
    "DeepSpeed": (prefixed("module.", transformers), None),
    "activation checkpointing": (inside(".mlp.", "._checkpoint_wrapped_module.mlp."), {"quant_method": "mxfp4"}),
    "PEFT, merged": (
        lambda made: {
            "base_model.model." + name.replace("_proj.weight", "_proj.base_layer.weight"): one
            for name, one in transformers(made).items()
        },
        None,
    ),
    "trl, with a value head": (lambda made: made | {"v_head.summary.weight": torch.ones(1, 8)}, None),
    "mlx-lm, 16 bits": (lambda made: mlx(made, floats)[0], None),
    "mlx-lm, MXFP4": (lambda made: mlx(made)[0], {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    "llm-compressor, MXFP4": (mxfp4("weight_packed"), {"quant_method": "compressed-tensors"}),
    "Quark, MXFP4": (mxfp4("weight"), {"quant_method": "quark"}),
}
ATTENTION = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
Lossy = Callable[[Tensors], tuple[Tensors, Tensors]]


def both(layout: Lossy, encode: Encode, ends: tuple[str, ...] = ATTENTION) -> Lossy:
    """Dense matrices are encoded, too."""

    def made(published: Tensors) -> tuple[Tensors, Tensors]:
        tensors, meant = layout(published)
        tensors, more = dense(tensors, encode, ends)
        return tensors, meant | more

    return made


EVERYTHING = (*ATTENTION, "embed_tokens.weight", "lm_head.weight")
# Of each layout whose values change: the tensors, the values that they mean, and quantization_config.
LOSSY: dict[str, tuple[Lossy, object]] = {
    "Unsloth, 4 bits": (both(lambda made: unsloth(made, nf4), nf4), BITSANDBYTES),
    "bitsandbytes without nested scales": (both(lambda made: unsloth(made, nf4_plain), nf4_plain), BITSANDBYTES),
    "bitsandbytes, int8": (
        both(lambda made: unsloth(made, int8_of_bitsandbytes), int8_of_bitsandbytes),
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
    ),
    "mlx-lm, 4 bits": (
        both(lambda made: mlx(made, affine(4, 32)), affine(8, 32), (*EVERYTHING, "router.weight")),
        {"group_size": 32, "bits": 4},
    ),
    "mlx-lm, 3 and 6 bits": (
        both(lambda made: mlx(made, affine(6, 32)), affine(6, 32), EVERYTHING),
        {"group_size": 32, "bits": 6},
    ),
    "llm-compressor, FP8": (
        both(lambda made: joined(made, fp8(of_rows), of_compressor), fp8(of_rows)),
        {"quant_method": "compressed-tensors"},
    ),
    "llm-compressor, NVFP4": (
        both(lambda made: joined(made, nvfp4_of_compressed_tensors, of_compressor), nvfp4_of_compressed_tensors),
        {"quant_method": "compressed-tensors"},
    ),
    "llm-compressor, int4": (
        lambda made: joined(made, integers, of_compressor),
        {"quant_method": "compressed-tensors"},
    ),
    "transformers, FP8 in tiles": (
        both(
            lambda made: joined(made, fp8(of_tiles, ".weight_scale_inv"), of_compressor),
            fp8(of_tiles, ".weight_scale_inv"),
        ),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "transformers, MXFP8": (lambda made: joined(made, mxfp8, of_compressor), {"quant_method": "mxfp8"}),
    "Quark, FP8": (
        both(lambda made: joined(made, fp8(torch.max), of_quark), fp8(torch.max)),
        {"quant_method": "quark"},
    ),
    "ModelOpt, FP8": (lambda made: modelopt(made, fp8(torch.max)), {"quant_method": "modelopt"}),
    "ModelOpt, NVFP4": (both(lambda made: modelopt(made, nvfp4), nvfp4), {"quant_method": "modelopt"}),
}


def joined(
    published: Tensors, encode: Encode, naming: Callable[[str, int], Mapping[str, slice]]
) -> tuple[Tensors, Tensors]:
    experts, meant = apart(published, encode, naming)
    return rest_of(published) | experts, meant
