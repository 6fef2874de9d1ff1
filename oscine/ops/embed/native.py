"""The embedding, in C, from the published table. Only the rows of the tokens are read. Definitions: reference.py."""

import torch
from torch import Tensor

from oscine.ops.embed import reference
from oscine.ops.native.library import check, library
from oscine.ops.native.weights import matrix


def prepare_embedding(weight_VH: Tensor, _: torch.dtype) -> Tensor:
    return weight_VH


def embed(token_ids_T: Tensor, weight_VH: Tensor) -> Tensor:
    address, kind, vocab, hidden = matrix(weight_VH)
    num_tokens = len(token_ids_T)
    x_TH = torch.empty(num_tokens, hidden)
    check(library().oscine_embed(token_ids_T.data_ptr(), address, kind, x_TH.data_ptr(), num_tokens, vocab, hidden))
    return x_TH


def embed_part(token_ids_T: Tensor, weight_VH: Tensor, first: int) -> Tensor:
    return reference.embed_part(token_ids_T, weight_VH, first).float()
