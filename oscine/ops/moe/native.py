"""The mixture of experts of one layer, in C: float32, contiguous. Definition: reference.py.

Activations are quantised to int8 in blocks of 32, so the result differs from the definition's by about 1 %.
"""

import torch
from torch import Tensor

from oscine.ops.interface import MxExperts, Routing
from oscine.ops.native.library import check, library
from oscine.ops.native.weights import PackedExperts, pack_mxfp4


def prepare_experts(experts: MxExperts) -> PackedExperts:
    return PackedExperts(
        pack_mxfp4(experts.gate_up_blocks, experts.gate_up_scales),
        experts.gate_up_bias.float().contiguous(),
        pack_mxfp4(experts.down_blocks, experts.down_scales),
        experts.down_bias.float().contiguous(),
        experts.gate_up_scales.shape[2],
        experts.down_scales.shape[2],
    )


def moe(x_TH: Tensor, routing: Routing, experts: PackedExperts, swiglu_limit: float) -> Tensor:
    out_TH = torch.empty_like(x_TH)
    ids_TK = routing.expert_ids_TK.long()
    num_experts, num_columns = experts.gate_up_bias.shape
    added = routing.added
    added_PN = None if added is None else added.first(x_TH).contiguous()
    h_PI = None if added is None else torch.empty(ids_TK.numel(), num_columns // 2)
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
            None if added_PN is None else added_PN.data_ptr(),
            None if h_PI is None else h_PI.data_ptr(),
        )
    )
    if added is not None and h_PI is not None:
        y_TKH = x_TH.new_empty(*ids_TK.shape, x_TH.shape[1])
        added.second(h_PI, y_TKH, adds=False)
        out_TH += y_TKH.sum(1)
    return out_TH
