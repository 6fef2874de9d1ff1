"""The mixture of experts of one layer, in C: float32, contiguous. Definition: reference.py.

The layout of the weights is that of ../native/experts.c. Activations are quantised to int8 in blocks of 32, so the
result differs from the definition's by about 1 %.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from oscine.ops.interface import MxExperts, Routing
from oscine.ops.native.library import check, library


@dataclass(frozen=True, slots=True)
class PackedExperts:
    gate_up: Tensor  # uint8, as experts.c wants it
    gate_up_bias: Tensor  # float32 [E, 2I]
    down: Tensor
    down_bias: Tensor  # float32 [E, H]
    gate_up_blocks: int  # of 32 columns, per row
    down_blocks: int


def prepare_experts(experts: MxExperts) -> PackedExperts:
    return PackedExperts(
        _packed(experts.gate_up_blocks, experts.gate_up_scales),
        experts.gate_up_bias.float().contiguous(),
        _packed(experts.down_blocks, experts.down_scales),
        experts.down_bias.float().contiguous(),
        experts.gate_up_scales.shape[2],
        experts.down_scales.shape[2],
    )


def _packed(blocks: Tensor, scales: Tensor) -> Tensor:
    num_experts, num_rows, num_blocks = scales.shape
    blocks, scales = blocks.contiguous(), scales.contiguous()
    out = torch.empty(num_experts, library().oscine_packed_bytes(num_rows, num_blocks), dtype=torch.uint8)
    library().oscine_pack(
        blocks.data_ptr(),
        scales.data_ptr(),
        out.data_ptr(),
        num_experts,
        num_rows,
        num_blocks,
    )
    return out


def moe(x_TH: Tensor, routing: Routing, experts: PackedExperts, swiglu_limit: float) -> Tensor:
    out_TH = torch.empty_like(x_TH)
    ids_TK = routing.expert_ids_TK.long()
    num_experts, num_columns = experts.gate_up_bias.shape
    check(
        library().oscine_moe(
            x_TH.data_ptr(),
            ids_TK.data_ptr(),
            routing.weights_TK.data_ptr(),
            experts.gate_up.data_ptr(),
            experts.gate_up_bias.data_ptr(),
            experts.down.data_ptr(),
            experts.down_bias.data_ptr(),
            out_TH.data_ptr(),
            *x_TH.shape,
            num_columns // 2,
            experts.gate_up_blocks,
            experts.down_blocks,
            num_experts,
            ids_TK.shape[1],
            swiglu_limit,
        )
    )
    return out_TH
