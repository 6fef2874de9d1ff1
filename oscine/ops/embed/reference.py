"""The embedding of tokens, of all and of a part of the vocabulary. The definitions; any device."""

import torch
from torch import Tensor


def prepare_embedding(weight_VH: Tensor, dtype: torch.dtype) -> Tensor:
    return weight_VH.to(dtype)


def embed(token_ids_T: Tensor, weight_VH: Tensor) -> Tensor:
    return weight_VH[token_ids_T]


def embed_part(token_ids_T: Tensor, weight_VH: Tensor, first: int) -> Tensor:
    """[T, H]: `weight_VH` has the tokens from `first` on. A token outside gives zeros."""
    row_T = token_ids_T - first
    inside_T = (row_T >= 0) & (row_T < len(weight_VH))
    return weight_VH[row_T.clamp(0, len(weight_VH) - 1)].masked_fill(~inside_T[:, None], 0)
