"""The sleeper of an engine, by its device."""

import torch

from oscine.executor.sleeper import Sleeper
from oscine.extensions.models.sleep.allowed import check_sleep
from oscine.extensions.models.sleep.cpu import CpuSleeper
from oscine.extensions.models.sleep.gpu import GpuSleeper
from oscine.settings.config import EngineOptions


def sleeper_of(options: EngineOptions, device: torch.device) -> Sleeper:
    """Raises ValueError for what cannot be combined with it."""
    check_sleep(options)
    return GpuSleeper(device) if device.type == "cuda" else CpuSleeper()
