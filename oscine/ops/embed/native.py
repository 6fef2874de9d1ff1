"""The embedding of tokens from a table as published: only the rows of tokens are read. Definitions: reference.py."""

import torch
from torch import Tensor

from oscine.ops.embed import reference


def prepare_embedding(weight_VH: Tensor, _: torch.dtype) -> Tensor:
    return weight_VH


def embed(token_ids_T: Tensor, weight_VH: Tensor) -> Tensor:
    return reference.embed(token_ids_T, weight_VH).float()


def embed_part(token_ids_T: Tensor, weight_VH: Tensor, first: int) -> Tensor:
    return reference.embed_part(token_ids_T, weight_VH, first).float()
