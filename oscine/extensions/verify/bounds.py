"""How far a correct result may be from the exact one: bounds from the arithmetic of the dtypes, none measured.

Rounding errors of single operations are taken as independent, with a mean of zero and at most the unit roundoff u of
the dtype. Then, by Hoeffding's inequality (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis,
2019), a sum of n terms in float32 is off by at most

    CERTAINTY * sqrt(n) * 2^-24 * (sum of the terms' magnitudes)

with probability 1 - 2 exp(-CERTAINTY^2 / 2) or more. Where the factors x_k of a sum of w_k x_k have errors of standard
deviation e_k, CERTAINTY * sqrt(sum (w_k e_k)^2) is added; a result that is stored in a dtype is rounded once more.

Shape suffixes as in ops/interface.py; N rows and K columns of a matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional

CERTAINTY = 8.0  # standard deviations: 2.5e-14 per element at most, and a 120b has about 1e10 of them
FLOAT32 = 2.0**-24  # unit roundoff of sums, in every dtype
FUNCTION = 2.0**-21  # relative error of exp, sigmoid, rsqrt, sine and cosine of a GPU's or a C library's fast kind
PLANES = 2.0**-13  # of the row's maximum: experts may multiply two FP8 values per activation (ops/planes.py)
BLOCK = 32  # activations that share one scale where experts multiply int8 (ops/moe/native.py)
SILU_SLOPE = 1.1  # largest derivative of g * sigmoid(1.702 g)
Error = Tensor | float


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What the ops compute in."""

    dtype: torch.dtype  # of activations
    expert_inputs: str  # "int8", "planes" or "exact"

    @property
    def unit(self) -> float:
        """Unit roundoff of the dtype."""
        return torch.finfo(self.dtype).eps / 2

    def rounded(self, exact: Tensor) -> Tensor:
        """In float32, after one rounding to the dtype."""
        return exact.to(self.dtype).float()

    def stored(self, x: Tensor) -> Tensor:
        """Standard deviation of the error of values in the dtype."""
        return x.abs() * (self.unit / sqrt(3))

    def into_experts(self, x_TK: Tensor) -> Tensor:
        """Standard deviation of the error of what experts multiply."""
        error_TK = self.stored(x_TK)
        if self.expert_inputs == "int8":
            most = x_TK.abs().view(len(x_TK), -1, BLOCK).amax(-1).repeat_interleave(BLOCK, -1)
            return (error_TK.square() + (most / 127 / sqrt(12)).square()).sqrt()
        if self.expert_inputs == "planes":
            most = x_TK.abs().amax(-1, keepdim=True) * (PLANES / sqrt(3))
            return (error_TK.square() + most.square()).sqrt()
        return error_TK

    def norm(self, normed_TH: Tensor) -> Tensor:
        """Of a norm in float32, stored in the dtype."""
        return normed_TH.abs() * (self.unit + FUNCTION + CERTAINTY * sqrt(normed_TH.shape[-1]) * FLOAT32)

    def product(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, error_TK: Tensor) -> Tensor:
        """Of x W^T + b, [T, N], where x has errors of this standard deviation."""
        y_TN = functional.linear(x_TK, weight_NK, bias_N)
        sums_TN = functional.linear(x_TK.abs(), weight_NK.abs(), None if bias_N is None else bias_N.abs())
        spread_TN = functional.linear(error_TK.square(), weight_NK.square()).sqrt()
        count = x_TK.shape[-1] + 1
        return self.unit * y_TN.abs() + CERTAINTY * (sqrt(count) * FLOAT32 * sums_TN + spread_TN)

    def rotated(self, heads_TND: Tensor, bound_TND: Tensor, position_T: Tensor) -> Tensor:
        """Of heads that are rotated: both halves mix, and an angle is off by its own rounding in float32."""
        size, bound = (torch.stack(x.chunk(2, -1)).sum(0).repeat(1, 1, 2) for x in (heads_TND.abs(), bound_TND))
        angle_T = FUNCTION + 4 * FLOAT32 * position_T.float()
        return 1.5 * (bound + size * (angle_T[:, None, None] + self.unit))  # YaRN's factor is below 1.5

    def attention(
        self, attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """`attend`: queries, keys and values -> heads [T, Q * D] and weights [Q, T, T]; see dense_attention."""
        heads, weights_QTT = attend(q, k, v)
        repeats, head_dim = q.shape[1] // k.shape[1], q.shape[2]
        sizes = torch.einsum("tqd,sqd->qts", q.abs(), k.abs().repeat_interleave(repeats, 1)).amax(-1) / sqrt(head_dim)
        # A score is off by that much, and so, relative to itself, is its exponential; the sum of them is as well.
        score_QT1 = 2 * (CERTAINTY * sqrt(head_dim) * FLOAT32 * sizes + FUNCTION)[..., None]
        values_QTD = v.repeat_interleave(repeats, 1).transpose(0, 1)
        sums = weights_QTT @ values_QTD.abs()
        spread = (weights_QTT.square() @ values_QTD.square()).sqrt() * (self.unit / sqrt(3))  # of weights in the dtype
        count = CERTAINTY * sqrt(len(q)) * FLOAT32
        bound = (score_QT1 + count) * sums + CERTAINTY * spread
        return bound.transpose(0, 1).flatten(1) + self.unit * heads.abs()

    def expert(self, x_TH: Tensor, weights: tuple[Tensor, Tensor, Tensor, Tensor], limit: float) -> Tensor:
        """Of one expert: gate and up [2I, H] with bias, and down [H, I] with bias, as in ops/moe/reference.py."""
        first, first_bias, second, second_bias = weights
        both = functional.linear(x_TH, first, first_bias)
        error = self.product(x_TH, first, first_bias, self.into_experts(x_TH))
        silu, factor = swiglu(both, limit)
        h = factor * silu
        # A bound of h is taken for CERTAINTY standard deviations of it.
        moved = factor.abs() * SILU_SLOPE * error[:, 0::2] + silu.abs() * error[:, 1::2] + FUNCTION * h.abs()
        spread = (self.into_experts(h).square() + (moved / CERTAINTY).square()).sqrt()
        return self.product(h, second, second_bias, spread)


def swiglu(both: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """The two factors [T, I] of what an expert multiplies by down, of gate and up [T, 2I]; see ops/moe/reference.py."""
    gate, up = both[:, 0::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate), up + 1


def dense_attention(
    q_TQD: Tensor, k_TGD: Tensor, v_TGD: Tensor, sinks_Q: Tensor, mask_TT: Tensor
) -> tuple[Tensor, Tensor]:
    """Heads [T, Q * D], and the weights of the keys [Q, T, T]. The definition of ops/attention without pages."""
    repeats = q_TQD.shape[1] // k_TGD.shape[1]
    keys, values = (x.repeat_interleave(repeats, 1) for x in (k_TGD, v_TGD))
    scores_QTT = torch.einsum("tqd,sqd->qts", q_TQD, keys) * q_TQD.shape[2] ** -0.5 + mask_TT
    sinks_QT1 = sinks_Q[:, None, None].expand(-1, len(q_TQD), 1)
    weights_QTT = torch.cat((scores_QTT, sinks_QT1), -1).softmax(-1)[..., :-1]
    return torch.einsum("qts,sqd->tqd", weights_QTT, values).flatten(1), weights_QTT
