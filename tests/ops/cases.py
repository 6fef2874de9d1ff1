"""Inputs for the ops, named by why they exist. No expected values and no tolerances."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.kernels.inputs import random_experts
from oscine.kv_dtype import rows_with_scales
from oscine.ops.interface import Batch, MxExperts, PageGroup
from oscine.ops.kv.fp8 import elements_and_exponents, quantise


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Sequences as (tokens computed, tokens in the cache afterwards)."""

    why: str
    sequences: tuple[tuple[int, int], ...]
    num_query_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 64
    window: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    q_TQD: Tensor
    kv_pages: (
        Tensor  # a strided view, as a layer's share of the pool is; NaN in every page and slot the op must not use
    )
    batch: Batch
    group: PageGroup
    sinks_Q: Tensor


ATTENTION_CASES = (
    AttentionCase("first token of a sequence", ((1, 1),)),
    AttentionCase("decode at both sides of a page border", ((1, 63), (1, 64), (1, 65))),
    AttentionCase("decodes of very different lengths", ((1, 1), (1, 700), (1, 130))),
    AttentionCase("decode of a context that several programs share", ((1, 2000), (1, 2))),
    AttentionCase("whole prompt", ((77, 77),)),
    AttentionCase("chunk that starts inside a page", ((50, 200),)),
    AttentionCase("decodes and chunks in one batch", ((1, 90), (33, 33), (1, 5), (40, 300), (1, 1))),
    AttentionCase("two tokens, as with a draft", ((2, 130), (2, 2))),
    AttentionCase("heads that fill no power of two", ((1, 70), (30, 90)), num_query_heads=6, num_kv_heads=2),
    AttentionCase("one query head a key head", ((1, 70), (9, 70)), num_query_heads=3, num_kv_heads=3),
    AttentionCase("eight query heads a key head", ((1, 70), (9, 70)), num_query_heads=16, num_kv_heads=2),
    AttentionCase("small pages and head", ((1, 40), (21, 40)), head_dim=16, page_size=16),
    AttentionCase("window: context shorter than it", ((1, 100), (60, 100)), window=128),
    AttentionCase("window: context of exactly the window, and one more", ((1, 128), (1, 129)), window=128),
    AttentionCase("window: pages before it are gone", ((1, 500), (1, 321), (70, 450)), window=128),
    AttentionCase(
        "window: decodes, then chunks that end a page and begin one",
        ((1, 20), (1, 400), (64, 192), (3, 387)),
        window=128,
    ),
    AttentionCase("window: chunk longer than it", ((300, 300), (300, 500)), window=128),
    AttentionCase("window: not a multiple of a page", ((1, 200), (90, 200)), window=37, page_size=32),
)


def attention_inputs(case: AttentionCase, device: torch.device, dtype: torch.dtype, seed: int = 0) -> AttentionInputs:
    """Pages are dealt in random order; tables hold -1 for pages that lie wholly before the window, or past the end."""
    generator = torch.Generator().manual_seed(seed)
    page = case.page_size
    spans = []
    for count, context in case.sequences:
        first = 0 if case.window is None else max(0, context - count - case.window + 1)
        spans.append((first // page, -(-context // page)))
    used = sum(last - first for first, last in spans)
    deal = iter(torch.randperm(used, generator=generator).add(1).tolist())  # page 0 is of no sequence
    table = torch.full((len(spans), max(last for _, last in spans) + 1), -1, dtype=torch.int32)
    for row, (first, last) in enumerate(spans):
        table[row, first:last] = torch.tensor([next(deal) for _ in range(first, last)], dtype=torch.int32)
    pool = torch.randn(
        used + 1, 2, 2, case.num_kv_heads, page, case.head_dim, generator=generator, dtype=torch.float32
    ).to(dtype)
    pool[0], pool[:, 0] = torch.nan, torch.nan
    for row, (_, context) in enumerate(case.sequences):
        pool[table[row, (context - 1) // page], ..., (context - 1) % page + 1 :, :] = torch.nan
    batch = _batch(case.sequences, table, page, generator)
    q_shape = (len(batch.token_ids_T), case.num_query_heads, case.head_dim)
    batch = to_device(batch, device)
    return AttentionInputs(
        q_TQD=torch.randn(q_shape, generator=generator).to(device, dtype),
        kv_pages=pool.to(device)[:, 1],
        batch=batch,
        group=batch.groups[0],
        sinks_Q=torch.randn(case.num_query_heads, generator=generator).to(device, dtype),
    )


def with_attention_sinks(inputs: AttentionInputs) -> AttentionInputs:
    """Attention as trained models have it: the first key draws nearly all, its value is small, and sinks differ much.

    Its logit is 12 more than without. Sequences whose first page is gone have their sinks only.
    """
    q, pages, head_dim = inputs.q_TQD + 1, inputs.kv_pages.clone(), inputs.q_TQD.shape[-1]
    for page in inputs.group.page_table_SB[:, 0].tolist():
        if page >= 0:
            pages[page, 0, :, 0] = 12 / head_dim**0.5 + pages[page, 0, :, 0] / 8
            pages[page, 1, :, 0] /= 100
    return replace(inputs, q_TQD=q, kv_pages=pages, sinks_Q=inputs.sinks_Q * 8)


def in_fp8(inputs: AttentionInputs) -> AttentionInputs:
    """The same keys and values as they are in a cache in FP8; what was NaN is NaN."""
    pages = inputs.kv_pages.float()
    *outer, page_size, head_dim = pages.shape
    pool = torch.full(
        (outer[0], 3, *outer[1:], rows_with_scales(page_size, head_dim), head_dim), 0xFF, dtype=torch.uint8
    )
    for stored, found in zip(elements_and_exponents(pool[:, 1]), quantise(pages.cpu()), strict=True):
        stored.copy_(found)
    return replace(inputs, kv_pages=pool.to(inputs.kv_pages.device)[:, 1])


def _batch(sequences: tuple[tuple[int, int], ...], table: Tensor, page_size: int, generator: torch.Generator) -> Batch:
    """There is one group; the logits of each sequence's last token are wanted. Leading single tokens are
    decodes; those after a chunk are chunks of one token."""
    counts = torch.tensor([count for count, _ in sequences])
    contexts = torch.tensor([context for _, context in sequences])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    positions = torch.cat([torch.arange(context - count, context) for count, context in sequences])
    row_T = torch.arange(len(sequences)).repeat_interleave(counts)
    slots = table[row_T, positions // page_size].long() * page_size + positions % page_size
    return Batch(
        token_ids_T=torch.randint(0, 100, (int(starts[-1]),), generator=generator),
        positions_T=positions,
        query_starts_S1=starts.int(),
        context_lens_S=contexts.int(),
        groups=(PageGroup(table, slots),),
        logits_rows_N=starts[1:] - 1,
        num_decodes=int((counts != 1).cumsum(0).eq(0).sum()),
    )


def to_device(batch: Batch, device: torch.device) -> Batch:
    return Batch(
        batch.token_ids_T.to(device),
        batch.positions_T.to(device),
        batch.query_starts_S1.to(device),
        batch.context_lens_S.to(device),
        tuple(PageGroup(group.page_table_SB.to(device), group.slots_T.to(device)) for group in batch.groups),
        None if batch.logits_rows_N is None else batch.logits_rows_N.to(device),
        batch.num_decodes,
    )


@dataclass(frozen=True, slots=True)
class MoeCase:
    why: str
    num_tokens: int
    hidden: int = 96
    intermediate: int = 160
    num_experts: int = 5
    experts_per_token: int = 4
    swiglu_limit: float = 7.0


@dataclass(frozen=True, slots=True)
class MoeInputs:
    x_TH: Tensor
    router_weight_EH: Tensor
    router_bias_E: Tensor
    experts: MxExperts
    experts_per_token: int
    swiglu_limit: float


MOE_CASES = (
    MoeCase("one token", 1),
    MoeCase("no token for some expert", 3, num_experts=32),
    MoeCase("odd token count, every expert busy", 37),
    MoeCase("one block of each input", 7, hidden=32, intermediate=32),
    MoeCase("all experts chosen", 5, num_experts=4),
    MoeCase("one expert a token", 9, experts_per_token=1),
    MoeCase("clamps that bite", 11, swiglu_limit=0.25),
)


def moe_inputs(case: MoeCase, device: torch.device, dtype: torch.dtype, seed: int = 0) -> MoeInputs:
    generator = torch.Generator().manual_seed(seed)
    hidden, intermediate, experts = case.hidden, case.intermediate, case.num_experts

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    packed = random_experts(experts, hidden, intermediate, device, dtype, scales=(122, 126), generator=generator)
    return MoeInputs(
        normal(case.num_tokens, hidden),
        normal(experts, hidden),
        normal(experts),
        packed,
        case.experts_per_token,
        case.swiglu_limit,
    )


# (tokens, hidden, why)
NORM_CASES = (
    (1, 2880, "one token at the published width"),
    (7, 96, "odd count, small width"),
    (3, 1, "width 1"),
    (0, 96, "no token"),
)
