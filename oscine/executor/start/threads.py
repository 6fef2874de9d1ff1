"""The number of threads that compute on a CPU."""

import torch

from oscine.cores import default_threads


def use_threads(count: int | None) -> None:
    """Sets torch's number of threads in this process, before its first step. None: the default.

    torch itself would use all logical CPUs.
    """
    torch.set_num_threads(count or default_threads())
