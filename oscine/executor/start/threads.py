"""The number of threads that compute on a CPU."""

import torch

from oscine.cores import usable_cores
from oscine.environment import Environment


def use_threads(count: int | None) -> None:
    """Sets torch's number of threads in this process, before its first step.

    None: OMP_NUM_THREADS, or else the physical cores that the process may use.
    """
    if count is not None or Environment().omp_num_threads is None:
        torch.set_num_threads(count or usable_cores())
