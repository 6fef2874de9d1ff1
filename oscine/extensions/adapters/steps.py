"""What the adapters of a step add to each layer: implements AddedLayer and its parts (ops/interface.py)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from oscine.extensions.adapters.products import Backend, Norm, Rows
from oscine.ops.interface import AddedProducts, Entries, ExpertTokens, LowRank, LowRankRows, Routing

Factors = Mapping[str, Tensor]  # of a layer, by the names of the layout; each of all slots


@dataclass(frozen=True, slots=True)
class Products:
    """An AddedProducts."""

    backend: Backend
    rows: Rows
    into: Tensor  # [S, segments * R, K]
    out_of: Tensor  # [S, N, R]
    ends: tuple[int, ...] = ()  # of the segments, in N

    @property
    def keys_T(self) -> Tensor:  # noqa: N802
        return self.rows.keys_T

    def add(self, x_TK: Tensor, out: Tensor) -> None:
        self.backend.expand(self.shrink(x_TK).y_STR, self.rows, self.out_of, out, adds=True, ends=self.ends)

    def shrink(self, x_TK: Tensor) -> LowRank:
        y = self.backend.shrink(x_TK, self.rows, self.into, max(1, len(self.ends)))
        return LowRank(self.keys_T, y, self.out_of)

    def expand(self, low: LowRank, squares_TS: Tensor, eps: float) -> Tensor:
        out = low.out_of.new_empty(len(low.keys_T), low.out_of.shape[-2])
        norm = Norm(squares_TS, eps, self.into.shape[-1])
        self.backend.expand(low.y_STR, self.rows, self.out_of, out, adds=False, ends=self.ends, norm=norm)
        return out


class Experts:
    """An AddedExperts."""

    def __init__(self, backend: Backend, keys_T: Tensor, routing: Routing, factors: Factors) -> None:
        self._backend, self._keys_T, self._routing, self._factors = backend, keys_T, routing, factors

    @cached_property
    def _rows(self) -> Rows:
        slots, experts = self._factors["gate_up_in"].shape[:2]
        return self._backend.rows(self._keys_T, slots, self._routing.expert_ids_TK, experts)

    def first(self, x_TH: Tensor) -> Tensor:
        out_of, rows = self._factors["gate_up_out"], self._rows
        out = torch.empty(rows.size, out_of.shape[-2], dtype=out_of.dtype, device=x_TH.device)
        out_TKN = out.view(len(x_TH), rows.per_token, -1)
        self._backend.through(x_TH, rows, self._factors["gate_up_in"], out_of, out_TKN, adds=False)
        return out

    def second(self, h_PI: Tensor, out_TKH: Tensor, *, adds: bool) -> None:
        into, out_of = self._factors["down_in"], self._factors["down_out"]
        weights_P = self._routing.weights_TK.flatten()
        self._backend.through(h_PI, self._rows, into, out_of, out_TKH, adds=adds, weights_P=weights_P)

    def shrink_first(self, x_TH: Tensor, entries: Entries) -> LowRankRows:
        into, out_of = self._factors["gate_up_in"], self._factors["gate_up_out"]
        return self._backend.shrink_entries(ExpertTokens(x_TH), entries, self._keys_T, into, out_of, first=True)

    def shrink_second(self, tokens: ExpertTokens, entries: Entries) -> LowRankRows:
        into, out_of = self._factors["down_in"], self._factors["down_out"]
        return self._backend.shrink_entries(tokens, entries, self._keys_T, into, out_of, first=False)


class Layer:
    """An AddedLayer."""

    def __init__(self, backend: Backend, rows: Rows, factors: Factors, qkv_ends: tuple[int, ...]) -> None:
        """`rows`: the tokens of the step, by the slots of their adapters."""
        self._backend, self._rows, self._factors = backend, rows, factors
        self.qkv: AddedProducts | None = None
        self.out: AddedProducts | None = None
        if "qkv_in" in factors:
            self.qkv = Products(backend, rows, factors["qkv_in"], factors["qkv_out"], qkv_ends)
            self.out = Products(backend, rows, factors["out_in"], factors["out_out"])

    def routed(self, x_TH: Tensor, routing: Routing, weight_EH: Tensor, bias_E: Tensor) -> Routing:
        if "router_in" in self._factors:
            routing = self._routed_again(x_TH, routing, weight_EH, bias_E)
        if "gate_up_in" not in self._factors:
            return routing
        return routing._replace(added=Experts(self._backend, self._rows.keys_T, routing, self._factors))

    def _routed_again(self, x_TH: Tensor, routing: Routing, weight_EH: Tensor, bias_E: Tensor) -> Routing:
        """All tokens, by logits with what adapters add to them; of equal logits any expert may go first."""
        logits_TE = functional.linear(x_TH.float(), weight_EH.float(), bias_E.float())
        added = Products(self._backend, self._rows, self._factors["router_in"], self._factors["router_out"])
        added.add(x_TH, logits_TE)
        ids_TK = routing.expert_ids_TK
        top_TK, chosen_TK = logits_TE.topk(ids_TK.shape[1], dim=-1)
        changed = routing._replace(expert_ids_TK=chosen_TK.to(ids_TK.dtype), weights_TK=top_TK.softmax(-1))
        if routing.counts_E is None:
            return changed._replace(logits_TE=None)
        return changed._replace(logits_TE=None).counted(len(bias_E))
