"""Where step times come from: a file, or what comes with the package, as GPU/KERNELS.

h200-120b.jsonl    a table that `oscine profile` measured; it is of one layout
h200/oscine        Oscine's own kernels: the steps that were measured, and what follows from them
gb200/trtllm       those of TensorRT-LLM, vLLM or SGLang, composed of times of ops
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from oscine.extensions.plan.foreign.compose import MODELS, GpuLayout
from oscine.extensions.plan.foreign.known import error_of, fitted_of, step_table
from oscine.extensions.plan.sources.gpus import Gpu, gpu_of
from oscine.extensions.plan.sources.own import own_table
from oscine.model.config import ModelConfig
from oscine.settings.option import OptionError, either, require
from oscine.timing.answer import NotMeasuredError
from oscine.timing.read import check, read_table
from oscine.timing.table import Header, StepTable

OWN = "oscine"
KERNELS = {OWN: "Oscine", "trtllm": "TensorRT-LLM", "vllm": "vLLM", "sglang": "SGLang"}


@dataclass(frozen=True, slots=True)
class Source:
    """One value of `--steps`."""

    text: str  # as it was given
    file: Path | None = None
    gpu: Gpu | None = None  # of what comes with the package
    kernels: str = ""

    @classmethod
    def of(cls, text: str) -> "Source":
        """Raises OptionError for what is neither a file nor GPU/KERNELS."""
        name, _, kernels = text.partition("/")
        if (path := Path(text)).exists() and not path.is_dir():
            return cls(text, path)
        sources = f"GPU/KERNELS with kernels of {either(tuple(KERNELS))}, such as h200/oscine"
        require(kernels in KERNELS, "steps", f"a file of `oscine profile`, or {sources}", text)
        return cls(text, None, gpu_of(name, "steps"), kernels)

    @property
    def activation_dtype(self) -> Literal["auto", "fp8"]:
        """Of the engines of a plan: those of a file; else exact ones. Raises ValueError and OSError."""
        return "fp8" if self.file is not None and _header_of(self.file).activation_dtype == "fp8" else "auto"

    @property
    def gpu_text(self) -> str:
        """The kind of GPU that its step times are of. Raises ValueError and OSError."""
        if self.gpu is not None:
            return self.gpu.name
        assert self.file is not None
        return _header_of(self.file).gpu

    def is_of(self, gpu: Gpu) -> bool:
        """Whether its step times are of this kind of GPU. Raises ValueError and OSError."""
        return self.gpu == gpu if self.gpu is not None else gpu.is_called(self.gpu_text)

    def check_model(self, model: str, config: ModelConfig) -> None:
        """Raises OptionError for a file of a model of other sizes, ValueError and OSError."""
        if self.file is None:
            return
        header = _header_of(self.file)
        if (header.layers, header.hidden) != (config.num_hidden_layers, config.hidden_size):
            wanted = f"{model} ({config.num_hidden_layers} layers, hidden size {config.hidden_size})"
            found = f"{header.model} ({header.layers} layers, hidden size {header.hidden})"
            raise OptionError("steps", f"must be of the model {wanted}; {self.file} is of {found}")

    def table(
        self, model: str, ranks: int, sharing: int, *, kv: str = "auto", activations: str = "auto", scaled: bool = False
    ) -> StepTable:
        """Of engines of `ranks` ranks, or of `sharing` engines that share experts.

        activations: with Oscine's own kernels.

        Raises NotMeasuredError if there is none, and for a file ValueError and OSError.
        """
        if self.file is not None:
            return self._read(model, ranks, sharing, scaled=scaled)
        assert self.gpu is not None
        known = "fp8" if kv.startswith("fp8") else "bfloat16"
        size = shape_of(model)
        if self.kernels == OWN:
            return own_table(size, self.gpu, ranks, sharing, kv=known, activations=activations, scaled=scaled)
        gpus = ranks * sharing
        layout = GpuLayout(gpus, ranks, 1 if sharing > 1 else ranks, sharing)
        return step_table(self.gpu.system, self.kernels, size, layout, kv=known, scaled=scaled)

    def _read(self, model: str, ranks: int, sharing: int, *, scaled: bool) -> StepTable:
        assert self.file is not None
        table = read_table(self.file, scaled=scaled)
        header = table.header
        if (header.tensor_parallel_size, header.expert_parallel_size) != (ranks, sharing):
            raise NotMeasuredError(f"{self.file} is of other layouts")
        return table

    def known_error(self, table: StepTable) -> str:
        """What is known about how far off it is, in words."""
        if held := [point for point in table.points if point.held_out]:
            found = check(table, held)
            return f"{found.points} steps that were kept out of the table: {found.error:.1%} mean absolute error"
        if self.file is not None:
            return "no steps were kept out of the table, so its error is not known"
        assert self.gpu is not None
        if self.kernels == OWN:
            return "interpolated and composed steps were not compared with servers; single steps vary by some 5 %"
        if (known := error_of(self.gpu.system, self.kernels)) is not None:
            return (
                f"TPOT {known.tpot:.1f} %, TTFT {known.ttft:.1f} % mean absolute error on {known.points} published "
                f"measurements that were not fitted"
            )
        _, place = fitted_of(self.gpu.system, self.kernels)
        return f"nothing to compare with; its rest is that of {place}"


@cache
def _header_of(file: Path) -> Header:
    return read_table(file).header


def is_published(model: str) -> bool:
    """Whether step times of it come with the package."""
    return any(size in model for size in MODELS)


def shape_of(model: str) -> str:
    """The published model that a name stands for. Raises NotMeasuredError."""
    for size in MODELS:
        if size in model:
            return size
    raise NotMeasuredError(f"no step times of {model} come with Oscine: give tables that `oscine profile` measured")


def usual_sources(gpu: Gpu, model: str) -> list[Source]:
    """Oscine's own step times where there are some, else those that others have measured."""
    own = Source.of(f"{gpu.name.lower()}/{OWN}")
    try:
        own.table(model, 1, 1)
    except NotMeasuredError:
        return [Source.of(f"{gpu.name.lower()}/trtllm")]
    return [own]
