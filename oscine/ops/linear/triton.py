"""The head on any CUDA GPU: cuBLAS.

No Triton in here; the file is named like the backend that it belongs to.
"""

import torch
from torch import Tensor


def lm_head(x_NH: Tensor, weight_VH: Tensor) -> Tensor:
    """[N, H] x [V, H] -> logits [N, V], float32, written so by cuBLAS."""
    return torch.mm(x_NH, weight_VH.T, out_dtype=torch.float32)
