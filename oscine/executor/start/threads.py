"""How many threads compute on a CPU."""

import torch

from oscine.cores import usable_cores
from oscine.environment import Environment


def use_threads(count: int | None) -> None:
    """For this process, before its first step. None: OMP_NUM_THREADS decides, or else the cores that it may use."""
    if count is not None or Environment().omp_num_threads is None:
        torch.set_num_threads(count or usable_cores())
