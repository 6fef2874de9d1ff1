"""Random experts and routings, and sampling parameters, for benchmarks and tests of kernels.

Skewed ones are like those of trained models: see oscine/model/skewed_weights.py.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from oscine.model.skewed_weights import router_bias
from oscine.ops.interface import MxExperts, Routing, SamplingBatch


def random_experts(
    num_experts: int,
    hidden: int,
    intermediate: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    scales: tuple[int, int],
    generator: torch.Generator | None = None,
) -> MxExperts:
    """scales: [low, high). Drawn where the generator is, or on the device."""
    where = device if generator is None else generator.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=where).to(device, dtype)

    def uniform(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator, device=where).to(device)

    hidden_blocks, intermediate_blocks = -(-hidden // 32), -(-intermediate // 32)
    return MxExperts(
        gate_up_blocks=uniform(0, 256, num_experts, 2 * intermediate, hidden_blocks, 16),
        gate_up_scales=uniform(*scales, num_experts, 2 * intermediate, hidden_blocks),
        gate_up_bias=normal(num_experts, 2 * intermediate),
        down_blocks=uniform(0, 256, num_experts, hidden, intermediate_blocks, 16),
        down_scales=uniform(*scales, num_experts, hidden, intermediate_blocks),
        down_bias=normal(num_experts, hidden),
    )


def random_routing(num_tokens: int, num_experts: int, per_token: int, device: torch.device) -> Routing:
    """Every set of experts alike; with counts, and ranks in the order of the tokens."""
    ids_TK = torch.rand(num_tokens, num_experts, device=device).argsort(1)[:, :per_token]
    return counted(ids_TK, torch.randn(num_tokens, per_token, device=device).softmax(-1), num_experts)


def skewed_routing(num_tokens: int, num_experts: int, per_token: int, device: torch.device) -> Routing:
    """Experts are chosen by a power law: the first choice of nearly all tokens is the same, and many have none."""
    bias_E = router_bias(num_experts, per_token)[torch.randperm(num_experts)].to(device)
    chosen = (torch.randn(num_tokens, num_experts, device=device) + bias_E).topk(per_token)
    return counted(chosen.indices, chosen.values.softmax(-1), num_experts)


def page_table(widths: Sequence[int], device: torch.device) -> Tensor:
    """int32 [sequences, most pages of one]: pages 0 .. sum(widths) - 1 in random order, -1 past a sequence's last."""
    order = iter(torch.randperm(sum(widths), dtype=torch.int32, device=device).split(list(widths)))
    table = torch.full((len(widths), max(widths)), -1, dtype=torch.int32, device=device)
    for row, width in zip(table, widths, strict=True):
        row[:width] = next(order)
    return table


def outlier_channels(width: int) -> list[int]:
    return [1, width // 2, width - 2]


def with_outliers(x: Tensor) -> Tensor:
    """The same, but three channels of the last dimension are 300 times as large."""
    skewed = x.clone()
    skewed[..., outlier_channels(x.shape[-1])] *= 300
    return skewed


def made_for_outliers(experts: MxExperts) -> MxExperts:
    """The same, but what multiplies a block with an outlier is 2^-8 of it, so that all channels count."""
    scales = experts.gate_up_scales.clone()
    for channel in outlier_channels(32 * scales.shape[-1]):
        scales[..., channel // 32] -= 8
    return replace(experts, gate_up_scales=scales)


def counted(ids_TK: Tensor, weights_TK: Tensor, num_experts: int) -> Routing:
    """A routing with counts, and ranks in the order of the tokens."""
    flat = ids_TK.flatten().long()
    counts_E = torch.bincount(flat, minlength=num_experts)
    order = flat.argsort(stable=True)
    ranks = torch.empty_like(flat)
    ranks[order] = torch.arange(len(flat), device=flat.device) - (counts_E.cumsum(0) - counts_E)[flat[order]]
    return Routing(ids_TK.int().contiguous(), weights_TK, counts_E.int(), ranks.int().view_as(ids_TK))


def sampling_batch(num_rows: int, device: torch.device, **changes: object) -> SamplingBatch:
    """Rows at temperature 1 without truncation, seeds 0, 1, 2 ..., all at position 0; changes replace fields."""
    fields: dict[str, object] = {
        "temperature_N": torch.ones(num_rows, device=device),
        "top_k_N": torch.zeros(num_rows, dtype=torch.int64, device=device),
        "top_p_N": torch.ones(num_rows, device=device),
        "min_p_N": torch.zeros(num_rows, device=device),
        "seed_N": torch.arange(num_rows, device=device),
        "position_N": torch.zeros(num_rows, dtype=torch.int64, device=device),
        "greedy": False,
        "truncated": False,
    }
    return SamplingBatch(**(fields | changes))  # type: ignore[arg-type]
