"""The op interface: what a model step needs of its device, and the records that go in and out.

Knows tensors only: no requests, no scheduling, no checkpoint files.

Shape suffixes: T tokens of the step, S sequences of the step, N sampled rows, V vocabulary, H hidden, I intermediate,
Q query heads, G key/value heads, D head dimension, F = (Q + 2G) * D, E experts, K experts per token, P page size,
B pages of a sequence, J partial sums, R rows of a head in a page: P, or more in FP8 (ops/kv/fp8.py).

Partial sums: what is followed by a norm may be given as [T, J, H], float32 or the dtype of the activations, whose sum
over J is meant. The norm reads it anyway; so a backend can split work without a launch that only adds up.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from oscine.ops.packed import BatchState, PackedStep


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Where one page group (layers with one window) keeps the tokens of this step's sequences."""

    page_table_SB: Tensor  # int32; page of tokens [b * P, (b + 1) * P) of sequence s; anything where freed or unused
    slots_T: Tensor  # int64; page * P + offset, where this step's keys and values are written


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: the tokens of S sequences, one after the other, prefill chunks and decodes mixed."""

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    query_starts_S1: Tensor  # int32; sequence s owns tokens query_starts[s] .. query_starts[s + 1] - 1
    context_lens_S: Tensor  # int32; tokens in the cache after this step, its own included
    groups: tuple[PageGroup, ...]
    logits_rows_N: Tensor | None  # int64; the tokens whose logits are wanted; None: all, in their order
    num_decodes: int = 0  # leading sequences known to have one token each, so that token s is of sequence s
    # int32; the leading sequences of one token, then those that are not empty: num_decodes is a bound. None: it is
    # exact, and none is empty
    counts_2: Tensor | None = None


class PreparedStep(NamedTuple):
    """The fields of Batch that depend on what the device keeps of running sequences; int64 where Batch says so."""

    token_ids_T: Tensor
    positions_T: Tensor
    context_lens_S: Tensor
    groups: tuple[PageGroup, ...]
    logits_rows_N: Tensor | None


# Physical KV memory per group: [pages, layers of the group, 2 (key, value), G, R, D]; one page is one contiguous block.
KVCache = tuple[Tensor, ...]


class AddedProducts(Protocol):
    """What low-rank adapters add to the products of one matrix, each token by its own adapter, if it has one."""

    @property
    def keys_T(self) -> Tensor:  # noqa: N802
        """int32: the slot of each token's adapter; below 0: it has none."""
        ...

    @property
    def into(self) -> Tensor:
        """The first factors: [slots, P * R, K]; P parts of N: queries, keys and values, or all."""
        ...

    @property
    def out_of(self) -> Tensor:
        """The second factors: [slots, N, R]."""
        ...

    def add(self, x_TK: Tensor, out: Tensor) -> None:
        """Adds the products of x to `out`: [T, N], or partial sums [T, J, N]. In place."""
        ...

    def shrink(self, x_TK: Tensor) -> "LowRank":
        """The products of x with the first factors, for kernels that multiply with the second ones. For GPUs."""
        ...

    def expand(self, low: "LowRank", squares_TS: Tensor, eps: float) -> Tensor:
        """[T, N] in the dtype of the factors: the products of x / rms, where rms^2 is the mean of squares_TS / K + eps.
        Rows of tokens without an adapter are not written."""
        ...


class LowRank(NamedTuple):
    """What is to be added to the products of tokens: out_of[keys_T[t]] times the sum of y_STR[:, t]."""

    keys_T: Tensor  # int32: slots of adapters; below 0: nothing is added to the token
    y_STR: Tensor  # float32: S partial sums of R values for each part of N: queries, keys and values, or all
    out_of: Tensor  # [slots, N, R], each slot contiguous


class AddedExperts(Protocol):
    """What low-rank adapters add to the two products of the experts of a step. P = T * K pairs: t * K + k."""

    def first(self, x_TH: Tensor) -> Tensor:
        """[P, N] in the dtype of the activations, N in the order of the backend's gates and ups: before SwiGLU."""
        ...

    def second(self, h_PI: Tensor, out_TKH: Tensor, *, adds: bool) -> None:
        """Adds the routing weights times the products of h to `out`, or writes them."""
        ...

    def shrink_first(self, x_TH: Tensor, entries: "Entries") -> "LowRankRows":
        """What `first` adds, for kernels that multiply with the second factors.

        A kernel that is launched next may read what is older than this call without waiting (gdc_wait).
        """
        ...

    def shrink_second(self, tokens: "ExpertTokens", entries: "Entries") -> "LowRankRows":
        """What `second` adds, without the routing weights. The tokens have a row for each pair, in order."""
        ...


class ExpertTokens(NamedTuple):
    """What a product of experts multiplies."""

    rows: Tensor  # [T, H] or [P, I], or planes of FP8 [P, 2, I] (ops/planes.py)
    factor: float = 1.0  # by which they are too large


class Entries(NamedTuple):
    """The pairs of a step in the order of a kernel: entries of a few rows of one expert each."""

    # int32: how many there are; from word 4 on, for each the expert, its first row, how many rows, and a word of no
    # use. Of a single token: its experts, or float32 the router's logits, of which the largest are meant.
    table: Tensor
    order_P: Tensor | None  # int32: the pair of each row; None: of a single token
    pairs: int
    most: int  # entries there can be
    rows: int  # of an entry, at most
    planes: int  # columns of the product that a row has


class LowRankRows(NamedTuple):
    """What is to be added to the products of an entry's rows: the sum over its adapters of out_of times the values."""

    # [D, P, planes, R], each row with the j-th adapter of its entry: zeros where it has another one, and in all planes
    # but the first. Anything where the entry has fewer.
    values_DPR: Tensor
    lists: Tensor  # int32 [entries, 1 + D]: how many adapters the rows of an entry have, and their slots
    out_of: Tensor  # [slots, E, N, R], each slot contiguous


class AddedLayer(Protocol):
    """What low-rank adapters add to one layer of a step."""

    qkv: AddedProducts | None
    out: AddedProducts | None

    def routed(self, x_TH: Tensor, routing: "Routing", weight_EH: Tensor, bias_E: Tensor) -> "Routing":
        """The routing of the tokens, with what is added to the experts."""
        ...


class QkvProjection(NamedTuple):
    """From normed tokens to rotated queries, and to keys and values in the cache."""

    weight_FH: Any  # of prepare_projection
    bias_F: Tensor
    cos_sin: Tensor  # float32 [max position, D]: D/2 cosines, then D/2 sines
    positions_T: Tensor
    kv_pages: Tensor  # [pages, 2, G, R, D], written
    slots_T: Tensor
    # uint8 [2, G], contiguous: calibrated exponents of pages in FP8 (ops/kv/fp8.py); None: each token has its own
    exponents_2G: Tensor | None = None
    added: AddedProducts | None = None


class UnrotatedQueries(NamedTuple):
    """Queries before RoPE. The attention kernel rotates them as it reads them."""

    q_TQD: Tensor  # a view of the projection's output; tokens are not contiguous
    cos_sin: Tensor  # of QkvProjection
    positions_T: Tensor


@dataclass(frozen=True, slots=True)
class MxExperts:
    """The experts of one layer, packed as published: MXFP4 blocks of 32 values along the input dimension."""

    gate_up_blocks: Tensor  # uint8 [E, 2I, H / 32, 16]; rows interleaved: even gate, odd up
    gate_up_scales: Tensor  # uint8 [E, 2I, H / 32]
    gate_up_bias: Tensor  # [E, 2I]
    down_blocks: Tensor  # uint8 [E, H, I / 32, 16]
    down_scales: Tensor  # uint8 [E, H, I / 32]
    down_bias: Tensor  # [E, H]


class Routing(NamedTuple):
    """Which experts each token goes to. Counts and ranks are given together, where a backend makes them on the way."""

    expert_ids_TK: Tensor  # int32 or int64, by descending weight
    weights_TK: Tensor  # float32; softmax over the K
    counts_E: Tensor | None = None  # int32; tokens of each expert
    ranks_TK: Tensor | None = None  # int32; 0 .. counts - 1 among the tokens of the same expert, in any order
    prepared: Any = None  # what the moe of this backend asked the norm to make of the tokens
    # float32; only for one token, if the moe of this backend chooses. Ids and weights are unset until it has run.
    logits_TE: Tensor | None = None
    added: AddedExperts | None = None

    def counted(self, num_experts: int) -> "Routing":
        """With counts and ranks of the ids that it has."""
        ids_P = self.expert_ids_TK.flatten().long()
        before_PE = torch.nn.functional.one_hot(ids_P, num_experts).cumsum(0)
        ranks_P = before_PE.gather(1, ids_P[:, None]) - 1
        return self._replace(counts_E=before_PE[-1].int(), ranks_TK=ranks_P.int().view_as(self.expert_ids_TK))


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Per-row sampling parameters (see types.SamplingParams for their meaning and order)."""

    temperature_N: Tensor  # float32
    top_k_N: Tensor  # int64; 0 is off
    top_p_N: Tensor  # float32
    min_p_N: Tensor  # float32
    seed_N: Tensor  # int64
    position_N: Tensor  # int64; position of the token that is sampled
    greedy: bool  # every row has temperature 0
    truncated: bool  # some row has top_k, top_p or min_p
    presence_N: Tensor | None = None  # float32; the three penalties and the two histories are given together
    frequency_N: Tensor | None = None  # float32
    repetition_N: Tensor | None = None  # float32
    output_counts_NV: Tensor | None = None  # int32; occurrences among the generated tokens
    prompt_mask_NV: Tensor | None = None  # bool; tokens of the prompt
    bias_rows: Tensor | None = None  # int64 [n]; logits[row, id] += value; -inf forbids a token
    bias_ids: Tensor | None = None  # int64 [n]
    bias_values: Tensor | None = None  # float32 [n]
    num_logprobs: int | None = None  # None: no log-probabilities; k: the sampled token's and the top k
    # Rows whose tokens are restricted; given together. At least one token of each must be allowed, and more than V may
    # be known: words W >= V / 32.
    allowed_KW: Tensor | None = None  # int32; bit t % 32 of word t // 32: whether token t may be chosen
    allowed_row_N: Tensor | None = None  # int32; the row's own row of allowed_KW, or -1: not restricted

    def of_rows(self, rows: slice) -> "SamplingBatch":
        """The batch of these rows only. The batch must have no biases."""
        assert self.bias_rows is None
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return replace(self, **{name: column[rows] for name, column in columns.items() if column is not None})


_COLUMNS = (  # of SamplingBatch: have an element, or a row, for each row of the batch
    *("temperature_N", "top_k_N", "top_p_N", "min_p_N", "seed_N", "position_N"),
    *("presence_N", "frequency_N", "repetition_N", "output_counts_NV", "prompt_mask_NV", "allowed_row_N"),
)


class Sampled(NamedTuple):
    token_ids_N: Tensor  # int64; -1 for a row without a logit above -inf
    logprobs_N: Tensor | None = None  # float32; of the sampled tokens, before any adjustment
    top_ids_NK: Tensor | None = None  # int64
    top_logprobs_NK: Tensor | None = None  # float32


@dataclass(frozen=True, slots=True)
class Shapes:
    """The dimensions of a model and its cache that decide whether a backend can be used."""

    dtype: torch.dtype  # of activations and of the cache
    page_size: int  # tokens
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    activation_dtype: str = "auto"  # of what experts multiply, as in Target


class Use(NamedTuple):
    """Which steps a backend serves, where it does not serve all."""

    steps: str  # for example "up to 64 tokens"
    otherwise: str  # the backend of all other steps
    unmet: str | None = None  # what shapes lack for it to serve any, for example "page size 64, not 32"


def unmet(*needs: tuple[str, object, object]) -> str | None:
    """Those of (what, wanted, found) that are not as wanted, in words."""
    return ", ".join(f"{what} {wanted}, not {found}" for what, wanted, found in needs if found != wanted) or None


# [T, Q, D]; UnrotatedQueries only where the attention of the same backend can rotate them
Queries = Tensor | UnrotatedQueries
# The result of Ops.prepare_dense or prepare_projection for a matrix [N, K]: a tensor, or a type of the backend's own.
# Its length is N.
Dense = Any
# (x_NH, weight_VH) -> logits_NV float32
LmHead = Callable[[Tensor, Dense], Tensor]
# (logits_NV float32, sampling) -> Sampled
Sample = Callable[[Tensor, SamplingBatch], Sampled]


@dataclass(frozen=True, slots=True)
class Chooser:
    """lm_head and sample in one, for rows of which nothing but temperature is asked: logits need not all be made."""

    prepare: Callable[[Dense], Any]  # weight_VH on the device -> the argument `prepared` of `choose`
    prepared_bytes: Callable[[int, int], int]  # (V, H) -> bytes of the prepared object
    # (x_NH, weight_VH, prepared, sampling) -> token ids_N int64, as in Sampled
    choose: Callable[[Tensor, Dense, Any, SamplingBatch], Tensor]
    restricts: bool = False  # whether rows may also be restricted to allowed tokens


@dataclass(frozen=True, slots=True)
class Ops:
    """The callables of one backend choice; a model receives it in its constructor. Definitions: each reference.py.

    The granularity is that of the kernels worth fusing; a callable may write into its inputs only where said.
    """

    # (token_ids_T int64, weight_VH) -> x_TH
    embed: Callable[[Tensor, Tensor], Tensor]
    # (x [T, H] or [T, J, H], weight_H, eps, residual_TH or None) -> (norm(x + residual), x + residual)
    rms_norm: Callable[[Tensor, Tensor, float, Tensor | None], tuple[Tensor, Tensor]]
    # (x [T, H] or [T, J, H], norm_weight_H, eps, residual_TH or None, projection)
    #     -> (q_TQD of norm(x + residual), x + residual)
    norm_qkv: Callable[[Tensor, Tensor, float, Tensor | None, QkvProjection], tuple[Queries, Tensor]]
    # (what norm_qkv gave, kv [pages, 2, G, R, D], batch, group, sinks_Q, window in tokens or None) -> [T, Q * D]
    attention: Callable[[Queries, Tensor, Batch, PageGroup, Tensor, int | None], Tensor]
    # ([T, Q * D], weight [H, Q * D], bias_H) -> [T, H] or [T, J, H]
    out_proj: Callable[[Tensor, Dense, Tensor, AddedProducts | None], Tensor]
    # (x [T, H] or [T, J, H], weight_H, eps, residual_TH, router_weight_EH, router_bias_E, K)
    #     -> (norm(x + residual), x + residual, routing of the former)
    norm_route: Callable[[Tensor, Tensor, float, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Routing]]
    # (published table [V, H] on the device; dtype of the activations) -> weight_VH of `embed`
    prepare_embedding: Callable[[Tensor, torch.dtype], Tensor]
    # (published matrix [N, K] on the device; dtype of the activations) -> weight of the dense products
    prepare_dense: Callable[[Tensor, torch.dtype], Dense]
    # as prepare_dense, for the projections of attention: of queries, keys and values together, and out of it
    prepare_projection: Callable[[Tensor, torch.dtype], Dense]
    # published experts on the device -> the experts of this backend's moe; both may share memory
    prepare_experts: Callable[[MxExperts], Any]
    # (x_TH, routing, prepared experts, swiglu limit) -> [T, H] or [T, J, H]
    moe: Callable[[Tensor, Routing, Any, float], Tensor]
    lm_head: LmHead
    sample: Sample
    chooser: Chooser
    # (x_KH, weight_VH, few_KA, temperature_K, noise_KA) -> token ids_K int64: the choice among few_KA (choose/few.py)
    choose_few: Callable[[Tensor, Dense, Tensor, Tensor, Tensor], Tensor]
    # (packed step, state) -> the fields of Batch that depend on the state; they share no memory with what goes in
    prepare_step: Callable[[PackedStep[Tensor], BatchState], PreparedStep]
    # (packed step, batch prepared of it, state written, sampled ids_M) -> ids_M int64, with REJECTED for those after a
    #     draft that was not accepted
    accept: Callable[[PackedStep[Tensor], Batch, BatchState, Tensor], Tensor]
