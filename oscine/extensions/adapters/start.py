"""The adapters of an executor that starts: what they take on the device, and which backend computes them."""

from collections.abc import Iterable
from pathlib import Path

import torch

from oscine.executor.adapters import Adapting, NoAdapters
from oscine.executor.start.shared import Start
from oscine.extensions.adapters.device import DeviceAdapters
from oscine.extensions.adapters.host import HostAdapters, factors_in
from oscine.extensions.adapters.layout import Layout, Packing, targets_of
from oscine.extensions.adapters.native import Native
from oscine.extensions.adapters.products import Backend, Reference
from oscine.model.gpt_oss import GptOss
from oscine.model.tensors import TensorSpec, tensor_specs
from oscine.ops.interface import Ops
from oscine.settings.adapters import TARGETS, NamedAdapter
from oscine.settings.option import OptionError

_LEAST_RANK = 16  # on a GPU, where it is a power of two, as tensor cores want it


class RuntimeAdapting(Adapting):
    is_on = True

    def __init__(self, start: Start) -> None:
        """Raises ValueError for options that do not go together, and for adapters that cannot be read."""
        self._start, self._options, self._opened = start, start.options.adapters, start.opened
        model, target = start.options.model, start.target
        if start.lockstep.shares_experts:
            raise OptionError(
                "enable-lora", "and --enable-expert-parallel exclude each other", "enable-expert-parallel"
            )
        self._specs = tensor_specs(start.opened.config)
        self._targets = self._options.lora_target_modules or targets_of_modules(self._options.modules, self._specs)
        self.reads_choice = "router" in self._targets
        if "experts" in self._targets:
            if model.experts_on_host not in (None, "0"):
                raise OptionError("experts-on-host", "excludes LoRA adapters of experts", "lora-target-modules")
            if target.activation_dtype != "auto":
                raise OptionError(
                    "activation-dtype", "must be auto for LoRA adapters of experts", "lora-target-modules"
                )
        self._on_gpu = start.on_gpu and start.platform.uses_triton
        self._order = self._gate_up_order(start)
        rank = self._options.max_lora_rank
        rank = max(_LEAST_RANK, 1 << (rank - 1).bit_length()) if self._on_gpu else rank
        rows = None if self._order is None else len(self._order)
        self._layout = Layout.of(start.config, self._targets, rank, rows)
        self.num_bytes = self._layout.size * self._options.max_loras * start.opened.dtype.itemsize

    def _gate_up_order(self, start: Start) -> torch.Tensor | None:
        if "experts" not in self._targets or start.platform.name != "hopper" or not self._on_gpu:
            return None
        from oscine.ops.moe.hopper_repack import UNIT, gate_up_order

        order = gate_up_order(start.config.intermediate_size, torch.device("cpu"))
        return torch.nn.functional.pad(order, (0, -len(order) % UNIT), value=-1)

    def load(self, model: GptOss, ops: Ops, num_seqs: int) -> NoAdapters:
        start, device, dtype = self._start, model.weights.device, self._opened.dtype
        packing = Packing(self._layout, self._opened.config, start.shard, self._order)
        host = HostAdapters(packing, self._specs, self._targets, self._options.max_lora_rank, dtype, device)
        memory = torch.zeros(self._options.max_loras, self._layout.size, dtype=dtype, device=device)
        parts = " ".join(self._targets)
        size = memory.nbytes / (1 << 30)
        start.report(f"LoRA adapters of {parts}: {len(memory)} at once on the device take {size:.2f} GiB")
        return DeviceAdapters(host, self._layout, memory, num_seqs, self._backend(start), ops)

    def _backend(self, start: Start) -> Backend:
        if not self._on_gpu:
            in_c = start.platform.has_c_kernels and self._opened.dtype == torch.float32
            return Native() if in_c else Reference()
        from oscine.extensions.adapters.kernels import Kernels

        return Kernels(start.target)


def targets_of_modules(modules: Iterable[NamedAdapter], specs: dict[str, TensorSpec]) -> tuple[str, ...]:
    """What these adapters change; without any, what takes little memory. Raises OptionError."""
    found: set[str] = set()
    for name, path in modules:
        try:
            found |= {*targets_of(factors_in(Path(path), specs))}
        except ValueError as error:
            raise OptionError("lora-modules", f"{name}: {error}") from None
    return tuple(one for one in TARGETS if one in found) or ("attention", "router")


def adapting_of(start: Start) -> RuntimeAdapting:
    return RuntimeAdapting(start)
