"""Writes a model in the published layout: experts in MXFP4, everything else in bfloat16, in safetensors.

A shard is written when it is complete, and config.json last, so that a folder with config.json is complete. An
interrupted conversion continues after its last shard: a file in the folder says of which source, and with which errors.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from oscine.checkpoint.folder import fingerprint
from oscine.checkpoint.hub import CONFIG, INDEX, SINGLE, TOKENIZER
from oscine.checkpoint.opened import open_model
from oscine.checkpoint.quantize import QuantizationError, errors_of
from oscine.extensions.formats.lora import LoraSource
from oscine.model.config import ModelConfig
from oscine.model.tensors import BYTES, tensor_specs
from oscine.model.weights import TensorSource
from oscine.settings.config import ModelOptions
from oscine.system.model_files import MAX_BYTES, MAX_TOKENIZER_BYTES, read_file, read_json

SHARD_BYTES = 2 << 30
_STATE, _PART = "conversion.json", ".part"
_TEXTS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")

Errors = dict[str, QuantizationError]  # by the name of a matrix of experts
Shards = dict[str, list[str]]  # file -> tensors


def convert(
    options: ModelOptions,
    target: Path,
    *,
    lora: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    quiet: bool = False,
) -> Errors:
    """Returns the errors of the experts that were quantised. `lora`: an adapter to merge. Raises ValueError, also if
    `target` has other files."""
    opened = open_model(options)
    if opened.path is None or opened.tokenizer is None:
        raise ValueError("random weights are not converted")
    specs = tensor_specs(opened.config)
    shards, total = _shards(opened.config, shard_bytes), sum(spec.num_bytes for spec in specs.values())
    texts = _texts(opened.path, opened.tokenizer)
    source = opened.source if lora is None else LoraSource(opened.source, lora, specs)
    made_of = [fingerprint(opened.path), shard_bytes, None if lora is None else str(lora.resolve())]
    state = _begin(target, {"made_of": made_of, "errors": {}})
    with tqdm(desc="Converting", total=total, unit="B", unit_scale=True, disable=quiet) as bar:
        for file, names in shards.items():
            if (target / file).exists():
                bar.update(sum(specs[name].num_bytes for name in names))
                continue
            _write(target / file, dict(_tensors(source, names, bar)))
            state["errors"] |= {name: [e.difference, e.values] for name, e in errors_of(source).items()}
            (target / _STATE).write_text(json.dumps(state))
    _finish(target, opened.config, texts, shards, total)
    return {name: QuantizationError(*sums) for name, sums in state["errors"].items()}


def _begin(target: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The state of this conversion in `target`, which is made if it is not there. Raises ValueError."""
    path = target / _STATE
    found: dict[str, Any] | None = None
    with suppress(ValueError):
        found = read_json(path)
    if found is not None:
        if found | {"errors": {}} != wanted:
            raise ValueError(f"{target}: it has the unfinished conversion of another model")
        return found
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target}: it is there already")
    target.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(wanted))
    return wanted


def _shards(config: ModelConfig, shard_bytes: int) -> Shards:
    groups: list[list[str]] = [[]]
    size = 0
    for name, spec in tensor_specs(config).items():
        if groups[-1] and size + spec.num_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += spec.num_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def _tensors(source: TensorSource, names: list[str], bar: "tqdm[Any]") -> Iterator[tuple[str, Tensor]]:
    for name in names:
        tensor = source.get(name)
        tensor = tensor if tensor.element_size() == BYTES["U8"] else tensor.bfloat16()
        yield name, tensor.contiguous()
        bar.update(tensor.nbytes)


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    part = path.with_name(path.name + _PART)
    try:
        save_file(tensors, part, metadata={"format": "pt"})
    except SafetensorError as error:  # of the disk
        part.unlink(missing_ok=True)
        raise OSError(f"{part}: {error}") from None
    part.chmod((path.parent / _STATE).stat().st_mode)  # safetensors gives it to its owner alone
    part.replace(path)


def _texts(model: Path, tokenizer: Path) -> dict[str, bytes]:
    """The small files that go with the weights, by name. Raises ValueError."""
    texts = {TOKENIZER: _own_file(tokenizer / TOKENIZER, MAX_TOKENIZER_BYTES)}
    for path in (model / name for name in _TEXTS if model.is_dir() and os.path.lexists(model / name)):
        texts[path.name] = _own_file(path, MAX_BYTES)
    return texts


def _own_file(path: Path, most: int) -> bytes:
    """The content of a file of a folder. A link may not leave the folder, or in the hub's cache the repository."""
    folder, found = (Path(os.path.realpath(one)) for one in (path.parent, path))
    blobs = folder.parents[1] / "blobs" if folder.parent.name == "snapshots" else folder
    if found.parent not in (folder, blobs):
        raise ValueError(f"{path}: is a link that leaves the folder, so it is not copied")
    return read_file(found, most)


def _finish(target: Path, config: ModelConfig, texts: dict[str, bytes], shards: Shards, total: int) -> None:
    if SINGLE not in shards:
        placed = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for name, text in texts.items():
        (target / name).write_bytes(text)
    config = replace(config, tie_word_embeddings=False)  # the head was written
    (target / CONFIG).write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    (target / _STATE).unlink()
