"""The model that the options name, checked and ready to be loaded. No weights are allocated yet."""

import hashlib
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch

from oscine.checkpoint.folder import Checkpoint, fingerprint, versions
from oscine.checkpoint.formats import format_of
from oscine.checkpoint.hub import (
    CONFIG,
    config_at,
    find_model,
    find_tokenizer,
    random_config,
    tokenizer_at,
    tokenizer_of_shapes,
)
from oscine.checkpoint.quantize import QuantizationError
from oscine.model.config import ModelConfig
from oscine.model.o200k import NUM_TOKENS, o200k_folder
from oscine.model.packed import PackedFiles
from oscine.model.skewed_weights import random_tensors
from oscine.model.tensors import Shard
from oscine.model.weights import HostPlace, TensorSource, Weights, load_weights
from oscine.ops.interface import Ops
from oscine.ops.native.weights import LAYOUT
from oscine.ops.triton_range import CUDA_REMEDY
from oscine.settings.config import ModelOptions

RANDOM_SEED = 0


@dataclass(frozen=True, slots=True)
class OpenedModel:
    config: ModelConfig
    tokenizer: Path | None  # folder of tokenizer.json, if known
    source: TensorSource
    device: torch.device
    dtype: torch.dtype  # of activations, KV and unquantised weights
    path: Path | None = None  # of the checkpoint; None for random weights

    def load(
        self,
        *,
        ops: Ops | None = None,
        shard: Shard | None = None,
        on_host: HostPlace | None = None,
        embedding_on_host: bool = False,
        files: PackedFiles | None = None,
        progress: bool = False,
    ) -> Weights:
        """Brings the weights to the device, prepared for `ops`; a shard's, or all. See load_weights."""
        return load_weights(
            self.config,
            self.source,
            self.device,
            self.dtype,
            ops=ops,
            shard=shard or Shard(),
            on_host=on_host,
            embedding_on_host=embedding_on_host,
            files=files,
            progress=progress,
        )

    @property
    def quantization_error(self) -> QuantizationError | None:
        """The error of all experts that were quantised as they were loaded; None if none were."""
        errors = self.source.errors.values() if isinstance(self.source, Checkpoint) else ()
        return reduce(QuantizationError.__add__, errors) if errors else None

    @property
    def kv_scales(self) -> int:
        """How many calibrated scales of FP8 attention the checkpoint has. None is used."""
        return self.source.kv_scales if isinstance(self.source, Checkpoint) else 0

    def packed_name(self, cpu_weights: str, shard: Shard) -> str | None:
        """The name of the folder of packed weights, unique for checkpoint and layout; None for random weights.

        The fingerprint samples each tensor. Sizes and times of the files tell apart what it does not see.
        """
        if self.path is None:
            return None
        state = fingerprint(self.path), versions(self.path), repr(self.config), LAYOUT, cpu_weights, shard
        return f"{self.path.name}-{hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()}"


def open_model(options: ModelOptions) -> OpenedModel:
    """Fetches missing files, checks every file, and makes the chosen GPU the current device.

    Raises ValueError naming the file, field or tensor at fault.
    """
    device = _device(options.device)
    dtype = _dtype(options.dtype, device)
    if options.random_shapes is not None:
        config, (_, is_skewed) = random_config(options), options.random_shapes
        tokenizer = _vocabulary_of_shapes(options, config)
        tensors = random_tensors(config, RANDOM_SEED, device, is_skewed=is_skewed)
        return OpenedModel(config, tokenizer, tensors, device, dtype)
    path = find_model(options)
    config, source = _open(path)
    tokenizer = find_tokenizer(options) if options.tokenizer else tokenizer_at(path)
    return OpenedModel(config, tokenizer, source, device, dtype, path)


def config_of(options: ModelOptions) -> ModelConfig:
    """The configuration of the whole model. Raises ValueError as open_model does."""
    if options.random_shapes is not None:
        return random_config(options)
    return config_at(find_model(options))


def _open(path: Path) -> tuple[ModelConfig, TensorSource]:
    """Checks everything but the values of the tensors."""
    if path.is_dir():
        config = ModelConfig.from_file(path / CONFIG)
        return config, Checkpoint(path, config)
    return format_of(path).open(path)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device must be cpu, cuda or cuda:N, not {name!r}") from None
    try:
        device = torch.empty(0, device=device).device  # "cuda" by its number
    # torch raises AssertionError for a device that it was not compiled for
    except (RuntimeError, AssertionError) as error:
        lacking = device.type == "cuda" and torch.version.cuda is None
        why = f"torch {torch.__version__} is built without CUDA; {CUDA_REMEDY}" if lacking else error
        raise ValueError(f"--device {name!r} cannot be used: {why}") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches kernels on the current one
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _vocabulary_of_shapes(options: ModelOptions, config: ModelConfig) -> Path | None:
    """The tokenizer folder that the API uses for random weights; None if the model has fewer tokens. For grammars."""
    found = tokenizer_of_shapes(options)
    if found is not None or config.vocab_size < NUM_TOKENS:
        return found
    try:
        return o200k_folder()
    except ValueError:  # a server has reported this before; a benchmark has no grammars
        return None
