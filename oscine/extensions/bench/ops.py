"""Measures every op of the chosen backends at the shapes of a model's step, against ceilings measured in the same run.

This module has the arithmetic of the table; step_inputs.py makes the inputs, and timer.py times the calls.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from oscine.extensions.bench.roofline import Ceiling
from oscine.extensions.bench.step_inputs import OpCall, StepLoad, random_weights, step_calls
from oscine.extensions.bench.timer import Time, time_call
from oscine.model.config import ModelConfig
from oscine.ops.platforms.table import choose, platform_of, resolve
from oscine.ops.target import CpuWeights, Target

HEADER = f"{'op':<18} {'backend':<10} {'a step':>6} {'us':>10} {'TB/s':>6} {'TFLOP/s':>8} {'ceiling':>8} {'of step':>8}"


@dataclass(frozen=True, slots=True)
class OpTime:
    op: OpCall
    backend: str
    time: Time
    step_share: float  # of the time of all ops of a step

    def ceiling_share(self, ceiling: Ceiling) -> float:
        """The share that the op reaches of the bandwidth or arithmetic, whichever limits it."""
        return ceiling.seconds(self.op.num_bytes, self.op.flops) / self.time.seconds

    def line(self, ceiling: Ceiling) -> str:
        seconds = self.time.seconds
        # on a CPU the caches hold all inputs
        share = "-" if self.time.how == "cpu" else f"{self.ceiling_share(ceiling):.1%}"
        return (
            f"{self.op.name:<18} {self.backend:<10} {self.op.per_step:>6} {seconds * 1e6:>10.2f} "
            f"{self.op.num_bytes / seconds / 1e12:>6.3f} {self.op.flops / seconds / 1e12:>8.2f} "
            f"{share:>8} {self.step_share:>8.1%}" + ("  not in a graph" if self.time.how == "eager" else "")
        )


class OpBench:
    """The ops of one device, and the weights to measure them with."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        overrides: Mapping[str, str],
        cpu_weights: CpuWeights = "int8",
        *,
        is_skewed: bool = False,
    ) -> None:
        """`is_skewed`: weights are those of --random-weights NAME:skewed.

        Raises ValueError for an op or backend that does not exist or cannot be loaded.
        """
        self._config, self._device = config, device
        target = replace(Target.of(device), cpu_weights=cpu_weights)
        self._backends = choose(platform_of(target, dtype).name, overrides)
        self._ops = resolve(target, self._backends)
        for op, backend in overrides.items():
            if device.type == "cpu" and backend not in ("reference", "native"):
                raise ValueError(f"--backend {op}={backend} needs a GPU")
        with torch.inference_mode():
            self._weights = random_weights(config, self._ops, device, dtype, is_skewed=is_skewed)

    @torch.inference_mode()
    def run(self, load: StepLoad) -> list[OpTime]:
        calls = step_calls(self._config, self._weights, self._ops, load)
        times = [time_call(op.call, self._device) for op in calls]
        step_s = sum(op.per_step * time.seconds for op, time in zip(calls, times, strict=True))
        return [
            OpTime(op, self._backends[op.backend_of], time, op.per_step * time.seconds / step_s)
            for op, time in zip(calls, times, strict=True)
        ]


def table(load: StepLoad, times: Sequence[OpTime], ceiling: Ceiling) -> Iterator[str]:
    """Lines for a terminal."""
    what = "decodes" if load.query_len == 1 else f"chunks of {load.query_len}"
    step_s = sum(row.op.per_step * row.time.seconds for row in times)
    yield f"{load.tokens} tokens: {load.sequences} {what}, context {load.context}"
    yield HEADER
    yield from (row.line(ceiling) for row in times)
    yield f"{'all ops of a step':<36} {step_s * 1e6:>10.0f}"
