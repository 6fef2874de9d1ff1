"""Ops in plain torch that never read device data on the host, so that any step can be captured."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from oscine.ops.interface import Batch, MxExperts, Ops, PageGroup, Routing
from oscine.ops.moe.mxfp4 import dequantize
from oscine.ops.moe.reference import swiglu
from oscine.ops.platforms.table import choose, resolve
from oscine.ops.target import Target


def capturable_ops(device: torch.device) -> Ops:
    """On a GPU steps are prepared by the kernels."""
    choice = choose("cpu", {"prepare_step": "triton"} if device.type == "cuda" else {})
    return replace(resolve(Target.of(device), choice), attention=attention, moe=moe, prepare_experts=prepare_experts)


def attention(
    q_TQD: Tensor, kv_pages: Tensor, batch: Batch, group: PageGroup, sinks_Q: Tensor, window: int | None
) -> Tensor:
    """Every token over every column of the page table of its sequence, unused ones included. A token before the first
    key is 0: a sequence of padding has more tokens than its context."""
    num_kv_heads, _, head_dim = kv_pages.shape[2:]
    token_T, ends_S = torch.arange(len(q_TQD), device=kv_pages.device), batch.query_starts_S1[1:].contiguous()
    sequence_T = torch.searchsorted(ends_S, token_T.int(), right=True)
    pages_TB2GPD = kv_pages[group.page_table_SB[sequence_T].clamp(min=0).long()].float()
    keys, values = pages_TB2GPD.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)  # [T, G, B * P, D]
    position_C = torch.arange(keys.shape[2], device=keys.device)
    query_T1 = (batch.context_lens_S[sequence_T] - ends_S[sequence_T] + token_T)[:, None]
    seen_TC = (position_C <= query_T1) & (position_C > query_T1 - (window or len(position_C)))
    q_TGRD = q_TQD.float().view(len(q_TQD), num_kv_heads, -1, head_dim) * head_dim**-0.5
    scores = (q_TGRD @ keys.transpose(2, 3)).masked_fill(~seen_TC[:, None, None], -torch.inf)
    sinks = sinks_Q.float().view(1, num_kv_heads, -1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    return (weights @ values).flatten(1).to(q_TQD.dtype)


def prepare_experts(experts: MxExperts) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gate_up = dequantize(experts.gate_up_blocks, experts.gate_up_scales)
    down = dequantize(experts.down_blocks, experts.down_scales)
    return gate_up, experts.gate_up_bias.float(), down, experts.down_bias.float()


def moe(x_TH: Tensor, routing: Routing, experts: tuple[Tensor, Tensor, Tensor, Tensor], swiglu_limit: float) -> Tensor:
    """Every expert computes every token."""
    gate_up, gate_up_bias, down, down_bias = experts
    weights_TE = torch.zeros(len(x_TH), len(gate_up), device=x_TH.device)
    weights_TE = weights_TE.scatter(1, routing.expert_ids_TK.long(), routing.weights_TK)
    out_TH = torch.zeros_like(x_TH, dtype=torch.float32)
    for e in range(len(gate_up)):
        hidden = swiglu(functional.linear(x_TH.float(), gate_up[e], gate_up_bias[e]), swiglu_limit)
        out_TH = out_TH + weights_TE[:, e, None] * functional.linear(hidden, down[e], down_bias[e])
    return out_TH.to(x_TH.dtype)
