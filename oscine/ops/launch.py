"""How Triton kernels are launched: programmatic dependent launch where the GPU has it, and arrival counters.

A kernel that takes `PDL` calls gdc_launch_dependents first, may then read weights, and calls gdc_wait before it
touches anything that an earlier kernel of the step writes or reads.
"""

import functools

import torch
from torch import Tensor

NUM_ARRIVALS = 8192


@functools.cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """The `PDL` constant of a kernel and the launch option that goes with it; compute capability 9.0 and newer."""
    dependent = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if dependent else {"PDL": False}


@functools.cache
def arrivals(device: torch.device) -> Tensor:
    """int32 [NUM_ARRIVALS] of zeros, by which the programs of one kernel find out which of them is last.

    Shared by all kernels of the device, so these must run on one stream; each leaves zeros behind.
    """
    return torch.zeros(NUM_ARRIVALS, dtype=torch.int32, device=device)
