"""y = x W^T + b, in the dtype of its inputs. The definition; any device."""

from torch import Tensor
from torch.nn import functional


def linear(x_TH: Tensor, weight_FH: Tensor, bias_F: Tensor | None) -> Tensor:
    """[T, H] x [F, H] -> [T, F]."""
    return functional.linear(x_TH, weight_FH, bias_F)
