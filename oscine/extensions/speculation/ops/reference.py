"""The ops of a draft head. The definitions; any device."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from oscine.extensions.speculation.ops.interface import DraftState, SliceOfHead
from oscine.ops.embed.reference import embed
from oscine.ops.interface import Batch, SamplingBatch
from oscine.ops.norm.reference import rms_norm
from oscine.ops.packed import REJECTED, PackedStep
from oscine.ops.rope.reference import rope_and_write as rope_and_write
from oscine.ops.sample.noise import gumbel_of
from oscine.ops.sample.reference import LOWEST_TEMPERATURE


def prepare(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, weight)


sums = linear


def gated(x: Tensor, weight: Tensor) -> Tensor:
    gate, value = linear(x, weight).chunk(2, -1)
    return functional.silu(gate) * value


def input(
    ids_T: Tensor, embed_VH: Tensor, embed_norm_H: Tensor, features_TH: Tensor, feature_norm_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    embedded_TH, _ = rms_norm(embed(ids_T, embed_VH), embed_norm_H, eps, None)
    normed_TH, _ = rms_norm(features_TH, feature_norm_H, eps, None)
    return join((embedded_TH, normed_TH)), normed_TH


def join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts], -1)


def choose(x_NH: Tensor, head: SliceOfHead, sampling: SamplingBatch) -> Tensor:
    return best_of(linear(x_NH, head.weight_UH).float(), head.ids_U, sampling)


def hold(packed: PackedStep[Tensor], batch: Batch, ids_M: Tensor, features_TH: Tensor, state: DraftState) -> Tensor:
    """All shapes are fixed, for CUDA graphs: rows that leave nothing write the row of padding."""
    count, padding = len(ids_M), len(state.lens) - 1
    rows_M, slots_M = packed.logits_rows_N[:count].long(), packed.sampled_slots_M[:count].long()
    ends_M = ids_M != REJECTED
    ends_M[:-1] &= ~((packed.given_T[rows_M[1:]] < -1) & (ids_M[1:] != REJECTED))
    slots_M = torch.where(ends_M, slots_M, padding)
    state.features[slots_M] = features_TH[rows_M]
    state.lens[slots_M] = torch.where(slots_M < padding, batch.positions_T[rows_M] + 1, 1).int()
    return ids_M.clamp(min=0)


def held(slots_D: Tensor, state: DraftState) -> Tensor:
    return state.features[slots_D.long()]


def sampling(slots_D: Tensor, positions_D: Tensor, state: DraftState) -> SamplingBatch:
    slots = slots_D.long()
    temperatures, seeds = state.temperatures[slots], state.seeds[slots]
    return drawn(temperatures, seeds, positions_D + 2)


def drawn(temperature_D: Tensor, seed_D: Tensor, position_D: Tensor) -> SamplingBatch:
    """Nothing but the temperature matters for a draft."""
    return SamplingBatch(
        temperature_D, seed_D, temperature_D, temperature_D, seed_D, position_D, greedy=False, truncated=False
    )


def put(drafts: Tensor, place: int, slots_D: Tensor, ids_D: Tensor) -> None:
    drafts[:, place].index_copy_(0, slots_D.long(), ids_D.int())


def best_of(logits_NU: Tensor, ids_U: Tensor, sampling: SamplingBatch) -> Tensor:
    """The noise of a token is the one that it has in the target's own choice."""
    if not sampling.greedy:
        temperature_N1 = sampling.temperature_N[:, None]
        noise_NU = gumbel_of(sampling.seed_N, sampling.position_N, ids_U)
        drawn_NU = logits_NU / temperature_N1.clamp(min=LOWEST_TEMPERATURE) + noise_NU
        logits_NU = torch.where(temperature_N1 > 0, drawn_NU, logits_NU)
    return ids_U[logits_NU.argmax(-1)]
