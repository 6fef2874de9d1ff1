"""RMSNorm and the router, in Triton: sm_80 and newer. Definitions: reference.py.

All norms add up partial sums and the residual in float32 and round that sum once, as it is stored, before it is
squared. Statistics and router logits are float32. Of equal logits the lower expert goes first; a NaN logit counts as
-inf, so that ids stay in range.

Few tokens: one launch, where each program adds and norms its token again and multiplies it with a few rows of the
router; the last program of a token chooses. More tokens: a norm kernel, then a matmul in tiles of tokens, split along
the hidden dimension while tiles are few; the last program of a tile chooses, and counts tokens by expert.

Of several ranks each has partial sums. Where the ranks have memory that all can write (oscine/ops/comm), these kernels
add up over ranks too: `name` is the slots that a norm uses.

Shape suffixes: T tokens, H hidden, J partial sums, E experts, K experts per token; R router rows of a program, S sums
of squares of a token.
"""

from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.ops.comm.push import clear, poll, push
from oscine.ops.comm.sums import ALONE, COLUMNS_PER_WARP, add_ranks, partial_sums, places_of, sum_over_ranks
from oscine.ops.interface import AddedProducts, LowRank, Routing
from oscine.ops.launch import NUM_ARRIVALS, after_wait, arrivals, arrives_last
from oscine.ops.planes import Planes, empty_planes, plane_arguments, store_planes, wanted
from oscine.ops.target import DispatchingExchange, Target

FUSED_TOKENS = 4  # up to here norm and router are one launch
UNCOUNTED_TOKENS = 16  # up to here norm_route gives neither counts nor ranks
SMALL_TOKENS = 512  # up to here the router splits the hidden dimension into programs of one step
FUSED_ROWS = 4  # router rows of one program of the fused kernel
SPLIT_H = 256  # hidden dimension of one program while tokens are few
LONG_SPLIT_H = 512  # the same where several tiles of tokens share the GPU
ADDS_UP = True  # partial sums over ranks (extensions/parallel/comm/ops.py)
LONG_SPLIT_BYTES = 147_456  # of shared memory, which its program takes
# A few programs on an empty GPU: without a limit of its own, ptxas saves registers for an occupancy that cannot come,
# and lets the loads of partial sums wait for one another.
ALL_LOADS_FIRST = {"num_warps": 32, "maxnreg": 64}

# The same loads in parts of PART_H columns, within the registers that two programs of the Hopper experts leave free on
# an SM.
PART_H = 512
BESIDE_EXPERTS = {"num_warps": 4, "maxnreg": 96}


def rms_norm(
    target: Target, x: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x [T, H] or partial sums [T, J, H]; returns (norm(x + residual), x + residual) in the dtype of the weight."""
    return _norm(target, x, weight_H, eps, residual_TH, _over_ranks(target, "experts", x, residual_TH))


def norm_route(
    target: Target,
    x: Tensor,
    weight_H: Tensor,
    eps: float,
    residual_TH: Tensor,
    router_weight_EH: Tensor,
    router_bias_E: Tensor,
    experts_per_token: int,
    *,
    fp8: bool = False,
    leave_choice: bool = False,
) -> tuple[Tensor, Tensor, Routing]:
    """rms_norm, and the experts of its first result. Counts and ranks come with more than UNCOUNTED_TOKENS tokens.

    fp8: where experts multiply in FP8, writes the planes of its first result. For sm_89 and newer, H a multiple of 32.
    leave_choice: of one token, gives the logits to the moe, which chooses (Routing.logits_TE).
    """
    router = _Router(router_weight_EH, router_bias_E, experts_per_token)
    if target.exchange is not None:
        return _norm_and_route_all(target, x, weight_H, eps, residual_TH, router, fp8)
    number = wanted(target, len(x), experts_per_token, len(router_bias_E)) if fp8 else 0
    planes = empty_planes(number, len(x), residual_TH.shape[1], x.device) if number else None
    ranks = _over_ranks(target, "attention", x, residual_TH)
    if x.shape[0] <= FUSED_TOKENS:
        arguments = x, weight_H, eps, residual_TH, ranks, router, planes, leave_choice
        y_TH, sum_TH, routing = _norm_route_fused(target, *arguments)
    else:
        counts_E = None
        if x.shape[0] > UNCOUNTED_TOKENS:
            counts_E = torch.empty(router_bias_E.shape[0], dtype=torch.int32, device=x.device)
        y_TH, sum_TH = _norm(target, x, weight_H, eps, residual_TH, ranks, counts_E, planes)
        routing = _route(target, y_TH, router, counts_E)
    return y_TH, sum_TH, routing._replace(prepared=planes)


def _norm_and_route_all(
    target: Target, x: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor, router: "_Router", fp8: bool
) -> tuple[Tensor, Tensor, Routing]:
    """norm_route where ranks share experts: the first result and the routing are of the tokens of all ranks."""
    assert hasattr(target.exchange, "dispatch")
    exchange = cast(DispatchingExchange, target.exchange)
    y_TH, sum_TH = rms_norm(target, x, weight_H, eps, residual_TH)
    num_tokens, num_experts, device = sum(exchange.tokens), len(router.bias_E), y_TH.device
    number = wanted(target, num_tokens, router.experts_per_token, num_experts) if fp8 else 0
    planes = empty_planes(number, num_tokens, y_TH.shape[1], device) if number else None
    counted = num_tokens > UNCOUNTED_TOKENS
    counts_E = torch.empty(num_experts, dtype=torch.int32, device=device) if counted else None
    all_nH = exchange.dispatch(y_TH, counts_E, planes)
    return all_nH, sum_TH, _route(target, all_nH, router, counts_E)._replace(prepared=planes)


class _Router(NamedTuple):
    weight_EH: Tensor
    bias_E: Tensor
    experts_per_token: int

    def empty_routing(self, num_tokens: int) -> Routing:
        shape, device = (num_tokens, self.experts_per_token), self.bias_E.device
        ids_TK = torch.empty(shape, dtype=torch.int32, device=device)
        return Routing(ids_TK, torch.empty(shape, dtype=torch.float32, device=device))


def _partials(x: Tensor) -> int:
    return x.shape[1] if x.dim() == 3 else 1


def _over_ranks(target: Target, name: str, x: Tensor, residual_TH: Tensor | None) -> dict[str, Any]:
    """Arguments of a kernel. What has no residual is whole on each rank."""
    return ALONE if residual_TH is None else partial_sums(target, name, len(x), x.shape[-1])


def _columns(ranks: dict[str, Any], block: int, options: dict[str, int]) -> dict[str, int]:
    """BLOCK_H and the launch options of its programs."""
    if ranks["RANKS"] == 1:
        return {"BLOCK_H": block, **options}
    block = max(block, COLUMNS_PER_WARP)
    most = block // COLUMNS_PER_WARP
    warps = min(options["num_warps"], most) if ranks["RANKS"] == 2 else most  # more ranks need more registers
    registers = {name: min(255, limit * options["num_warps"] // warps) for name, limit in options.items()}
    return {"BLOCK_H": block, **registers, "num_warps": warps}


def _norm(
    target: Target,
    x: Tensor,
    weight_H: Tensor,
    eps: float,
    residual_TH: Tensor | None,
    ranks: dict[str, Any],
    counts_E: Tensor | None = None,
    planes: Planes | None = None,
) -> tuple[Tensor, Tensor]:
    """Sets counts_E to zero on the way, and writes planes."""
    num_tokens, hidden = x.shape[0], x.shape[-1]
    y_TH, sum_TH = _outputs(x, weight_H, residual_TH)
    if num_tokens:
        num_experts = 1 if counts_E is None else counts_E.shape[0]
        _norm_kernel[(num_tokens,)](
            x,
            residual_TH,
            weight_H,
            y_TH,
            sum_TH,
            counts_E,
            **plane_arguments(planes),
            eps=eps,
            H=hidden,
            J=_partials(x),
            E=num_experts,
            BLOCK_E=triton.next_power_of_2(num_experts),
            **_columns(
                ranks,
                triton.next_power_of_2(hidden),
                target.program(ALL_LOADS_FIRST if num_tokens <= 128 else {"num_warps": 4}),
            ),
            **ranks,
            **target.launch_options,
        )
    return y_TH, x if sum_TH is None else sum_TH


def _outputs(x: Tensor, weight_H: Tensor, residual_TH: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Of a norm and of the sum before it; None where the sum is x itself."""
    y_TH = torch.empty((x.shape[0], x.shape[-1]), dtype=weight_H.dtype, device=x.device)
    unchanged = x.dim() == 2 and residual_TH is None and x.dtype == weight_H.dtype
    return y_TH, None if unchanged else torch.empty_like(y_TH)


def undivided_norm(
    target: Target, x: Tensor, weight_H: Tensor, residual_TH: Tensor | None, added: AddedProducts | None = None
) -> tuple[Tensor, Tensor, Tensor, LowRank | None]:
    """rms_norm but for the division: ((x + residual) * weight, x + residual, sums of squares of the latter [T, S]).

    A token's sums, added up and divided by H, are its mean square. Several programs a token, each with few registers:
    they find room beside a kernel that still runs, and the one that reads this can start as early.

    Last, the first result times the first factors of adapters, by programs of their own. None without adapters, and on
    one of several ranks, which add up what each of their programs reads once.
    """
    num_tokens, hidden = x.shape[0], x.shape[-1]
    parts = triton.cdiv(hidden, PART_H)
    y_TH, sum_TH = _outputs(x, weight_H, residual_TH)
    squares_TS = torch.empty((num_tokens, parts), dtype=torch.float32, device=x.device)
    ranks, low, into, segments, rank = _over_ranks(target, "experts", x, residual_TH), None, None, 0, 0
    if added is not None and ranks["RANKS"] == 1:
        into, rank = added.into, added.out_of.shape[-1]
        segments = into.shape[-2] // rank
        y_STR = torch.empty((parts, num_tokens, segments * rank), dtype=torch.float32, device=x.device)
        low = LowRank(added.keys_T, y_STR, added.out_of)
    _undivided_norm_kernel[(parts, num_tokens, 1 + segments)](
        x,
        residual_TH,
        weight_H,
        y_TH,
        sum_TH,
        squares_TS,
        None if low is None else low.keys_T,
        into,
        None if low is None else low.y_STR,
        0 if into is None else into.stride(0),
        RANK=rank,
        H=hidden,
        J=_partials(x),
        **_columns(ranks, PART_H, target.program(BESIDE_EXPERTS)),
        **ranks,
        **target.launch_options,
    )
    return y_TH, x if sum_TH is None else sum_TH, squares_TS, low


def _norm_route_fused(
    target: Target,
    x: Tensor,
    weight_H: Tensor,
    eps: float,
    residual_TH: Tensor,
    ranks: dict[str, Any],
    router: _Router,
    planes: Planes | None,
    leaves_choice: bool,
) -> tuple[Tensor, Tensor, Routing]:
    (num_tokens, hidden), num_experts = residual_TH.shape, len(router.bias_E)
    y_TH, sum_TH = _outputs(x, weight_H, residual_TH)
    assert sum_TH is not None
    routing = router.empty_routing(num_tokens)
    if num_tokens:
        logits_TE = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=x.device)
        _norm_route_kernel[(triton.cdiv(num_experts, FUSED_ROWS), num_tokens)](
            x,
            residual_TH,
            weight_H,
            router.weight_EH,
            router.bias_E,
            y_TH,
            sum_TH,
            logits_TE,
            arrivals(x.device),
            routing.expert_ids_TK,
            routing.weights_TK,
            **plane_arguments(planes),
            eps=eps,
            H=hidden,
            J=_partials(x),
            E=num_experts,
            K=router.experts_per_token,
            CHOOSES=not leaves_choice,
            BLOCK_R=FUSED_ROWS,
            BLOCK_E=triton.next_power_of_2(num_experts),
            **_columns(ranks, triton.next_power_of_2(hidden), target.program(ALL_LOADS_FIRST)),
            **ranks,
            **target.launch_options,
        )
        if leaves_choice:
            routing = routing._replace(logits_TE=logits_TE)
    return y_TH, sum_TH, routing


def _route(target: Target, y_TH: Tensor, router: _Router, counts_E: Tensor | None) -> Routing:
    """counts_E holds zeros; it is counted up."""
    (num_tokens, hidden), num_experts = y_TH.shape, len(router.bias_E)
    tiling = _tiling(target, num_tokens, hidden)
    tiles = triton.cdiv(num_tokens, tiling["BLOCK_T"])
    assert tiles <= NUM_ARRIVALS
    routing = router.empty_routing(num_tokens)
    if counts_E is not None:
        routing = routing._replace(counts_E=counts_E, ranks_TK=torch.empty_like(routing.expert_ids_TK))
    partial_STE = torch.empty((tiling["SPLITS"], num_tokens, num_experts), dtype=torch.float32, device=y_TH.device)
    _route_kernel[(tiles, tiling["SPLITS"])](
        y_TH,
        router.weight_EH,
        router.bias_E,
        partial_STE,
        arrivals(y_TH.device),
        *routing[:4],
        num_tokens,
        H=hidden,
        E=num_experts,
        K=router.experts_per_token,
        BLOCK_E=max(16, triton.next_power_of_2(num_experts)),
        BLOCK_K=triton.next_power_of_2(router.experts_per_token),
        **tiling,
        **target.launch_options,
    )
    return routing


def _tiling(target: Target, num_tokens: int, hidden: int) -> dict[str, int]:
    """Tokens of a tile, and how its hidden dimension is cut into SPLITS programs of STEPS steps of BLOCK_H.

    The long split fetches twice the weights before it waits for the norm, which needs dependent launches and room.
    """
    if num_tokens <= SMALL_TOKENS:
        long = target.dependent_launch and target.shared_memory >= LONG_SPLIT_BYTES
        block_h = LONG_SPLIT_H if long and num_tokens > UNCOUNTED_TOKENS else SPLIT_H
        splits = triton.cdiv(hidden, block_h)
        program = target.program({"num_warps": 8, "maxnreg": 128})
        return {"BLOCK_T": 16, "BLOCK_H": block_h, "SPLITS": splits, "STEPS": 1, **program}
    steps = triton.cdiv(hidden, 64)
    splits = 1 if num_tokens > 8192 else min(steps, 3)
    block_t = 32 if target.architecture else 64  # gfx942 has 64 KiB of shared memory
    return {"BLOCK_T": block_t, "BLOCK_H": 64, "SPLITS": splits, "STEPS": triton.cdiv(steps, splits), "num_warps": 8}


@triton.jit
def add_partials(x, token, column_H, inside_H, H: tl.constexpr, J: tl.constexpr):
    """float32 sum of this rank's partial sums of one token."""
    sum_H = tl.load(x + token * J * H + column_H, mask=inside_H, other=0).to(tl.float32)
    for j in tl.static_range(1, J):
        sum_H += tl.load(x + (token * J + j) * H + column_H, mask=inside_H, other=0).to(tl.float32)
    return sum_H


@triton.jit
def clear_counts(counts, program, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Zeros, by the program 0."""
    if program == 0:
        expert_E = tl.arange(0, BLOCK_E)
        tl.store(counts + expert_E, tl.zeros_like(expert_E), mask=expert_E < E)


@triton.jit
def _scale(sum_H, weight_H, eps, H: tl.constexpr):
    return sum_H * tl.rsqrt(tl.sum(sum_H * sum_H, 0) / H + eps) * weight_H


@triton.jit
def _begin(
    x,
    residual,
    weight,
    token,
    column_H,
    inside_H,
    addresses,
    slot,
    rank,
    state,
    H: tl.constexpr,
    J: tl.constexpr,
    dtype: tl.constexpr,
    RANKS: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Lets the next kernel begin, and waits for the one before. Returns (the sum, rounded; weights in float32).

    The sum: partial sums of all ranks, and the residual, which is read before the other ranks are waited for.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    weight_H = tl.load(weight + column_H, mask=inside_H, other=0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    sum_H = add_partials(x, token, column_H, inside_H, H, J)
    if residual is not None:
        residual_H = tl.load(residual + token * H + column_H, mask=inside_H, other=0).to(tl.float32)
    if RANKS > 1:
        place_H = places_of(token, column_H, inside_H, H)
        row = token.to(tl.int32)
        sum_H = sum_over_ranks(
            sum_H.to(tl.bfloat16), place_H, row, addresses, slot, rank, state, RANKS, TWO_SHOT, PACK=8
        )
    if residual is not None:
        sum_H += residual_H
    return sum_H.to(dtype), weight_H


@triton.jit(do_not_specialize=["rank"])
def _norm_kernel(
    x,
    residual,
    weight,
    y,
    total,
    counts,
    values,
    scale,
    eps,
    addresses,
    slot,
    rank,
    state,
    H: tl.constexpr,
    J: tl.constexpr,
    E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr,
    RANKS: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column_H = tl.arange(0, BLOCK_H)
    inside_H = column_H < H
    dtype: tl.constexpr = y.dtype.element_ty
    sum_H, weight_H = _begin(
        x, residual, weight, token, column_H, inside_H, addresses, slot, rank, state, H, J, dtype, RANKS, TWO_SHOT, PDL
    )
    y_H = _scale(sum_H.to(tl.float32), weight_H, eps, H)
    tl.store(y + token * H + column_H, y_H.to(y.dtype.element_ty), mask=inside_H)
    if total is not None:
        tl.store(total + token * H + column_H, sum_H, mask=inside_H)
    if values is not None:
        store_planes(y_H.to(y.dtype.element_ty).to(tl.float32), values, scale, token, H, BLOCK_H, PLANES)
    if counts is not None:
        clear_counts(counts, token, E, BLOCK_E)


@triton.jit(do_not_specialize=["rank"])
def _undivided_norm_kernel(
    x,
    residual,
    weight,
    y,
    total,
    squares,
    keys,
    first,
    low,
    slot_stride,
    addresses,
    slot,
    rank,
    state,
    RANK: tl.constexpr,
    H: tl.constexpr,
    J: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RANKS: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """RANK above 0: the programs of each segment, behind the others, shrink what these write."""
    token = tl.program_id(1).to(tl.int64)
    column_H = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside_H = column_H < H
    dtype: tl.constexpr = y.dtype.element_ty
    if RANK and tl.program_id(2) > 0:  # keys and factors are older than the kernel before
        key, segment = tl.load(keys + token), tl.program_id(2) - 1
        row_R = segment * RANK + tl.arange(0, RANK)
        first_RH = tl.load(
            first + tl.maximum(key, 0).to(tl.int64) * slot_stride + row_R[:, None] * H + column_H[None, :],
            mask=inside_H[None, :] & (key >= 0),
            other=0.0,
        )
        sum_H, weight_H = _begin(
            x, residual, weight, token, column_H, inside_H, addresses, slot, rank, state,
            H, J, dtype, RANKS, TWO_SHOT, PDL,
        )  # fmt: skip
        y_H = (sum_H.to(tl.float32) * weight_H).to(dtype).to(tl.float32)
        low_R = tl.sum(first_RH.to(tl.float32) * y_H[None, :], 1)
        at = (tl.program_id(0) * tl.num_programs(1) + token) * ((tl.num_programs(2) - 1) * RANK)
        tl.store(low + at + row_R, low_R, mask=(key >= 0) & (row_R >= 0))
        return
    sum_H, weight_H = _begin(
        x, residual, weight, token, column_H, inside_H, addresses, slot, rank, state, H, J, dtype, RANKS, TWO_SHOT, PDL
    )
    tl.store(y + token * H + column_H, (sum_H.to(tl.float32) * weight_H).to(y.dtype.element_ty), mask=inside_H)
    if total is not None:
        tl.store(total + token * H + column_H, sum_H, mask=inside_H)
    square = tl.sum(sum_H.to(tl.float32) * sum_H.to(tl.float32), 0)
    tl.store(squares + token * tl.num_programs(0) + tl.program_id(0), square)


@triton.jit(do_not_specialize=["rank"])
def _norm_route_kernel(
    x,
    residual,
    weight,
    router_weight,
    router_bias,
    y,
    total,
    logits,
    arrivals,
    expert_ids,
    weights,
    values,
    scale,
    eps,
    addresses,
    slot,
    rank,
    state,
    H: tl.constexpr,
    J: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    CHOOSES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr,
    RANKS: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(1)
    column_H = tl.arange(0, BLOCK_H)
    inside_H = column_H < H
    expert_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    weight_H = tl.load(weight + column_H, mask=inside_H, other=0).to(tl.float32)
    router_RH = tl.load(
        router_weight + expert_R[:, None] * H + column_H[None, :],
        mask=(expert_R < E)[:, None] & inside_H[None, :],
        other=0,
    )
    bias_R = tl.load(router_bias + expert_R, mask=expert_R < E, other=0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    sum_H = add_partials(x, token, column_H, inside_H, H, J)
    residual_H = tl.load(residual + token * H + column_H, mask=inside_H, other=0).to(tl.float32)
    if RANKS > 1:
        tl.static_assert(not TWO_SHOT)
        place_H = places_of(token, column_H, inside_H, H)
        sent = tl.where(tl.program_id(0) == 0, place_H, -1)
        own = push((sum_H.to(tl.bfloat16),), sent, addresses, 1, 8, 4)
        others = poll(own, place_H, addresses[0], slot, state, RANKS - 1, False, 1, 8, 4)
        sum_H = add_ranks(own[0], others, rank, RANKS)
    sum_H = (sum_H + residual_H).to(y.dtype.element_ty)
    y_H = _scale(sum_H.to(tl.float32), weight_H, eps, H).to(y.dtype.element_ty)
    logits_R = tl.sum(router_RH.to(tl.float32) * y_H.to(tl.float32)[None, :], 1) + bias_R
    tl.store(logits + token * E + expert_R, logits_R, mask=expert_R < E)
    arrived = -1
    if CHOOSES or RANKS > 1:
        tl.debug_barrier()  # the atomic of one thread publishes what all threads stored
        arrived = tl.atomic_add(arrivals + token, 1)
    if tl.program_id(0) == 0:
        tl.store(y + token * H + column_H, y_H, mask=inside_H)
        tl.store(total + token * H + column_H, sum_H, mask=inside_H)
        if values is not None:
            store_planes(y_H.to(tl.float32), values, scale, token, H, BLOCK_H, PLANES)
    if arrived == tl.num_programs(0) - 1:
        if RANKS > 1:
            clear(own, place_H, addresses[0], slot, RANKS - 1, 8, 4)
        tl.store(arrivals + token, 0)
        if CHOOSES:
            expert_E = tl.arange(0, BLOCK_E)
            logits_E = tl.load(logits + token * E + expert_E, mask=expert_E < E, other=0, cache_modifier=".cg")
            rank_E = rank_of(logits_E, E, BLOCK_E)
            chosen_E = rank_E < K
            best = tl.max(tl.where(rank_E == 0, logits_E, float("-inf")), 0)
            exp_E = tl.where(chosen_E, tl.exp(logits_E - best), 0.0)
            tl.store(expert_ids + token * K + rank_E, expert_E, mask=chosen_E)
            tl.store(weights + token * K + rank_E, exp_E / tl.sum(exp_E, 0), mask=chosen_E)


@triton.jit
def rank_of(logits_E, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """How many of the E experts go before each; a permutation for any logits."""
    expert_E = tl.arange(0, BLOCK_E)
    logits_E = tl.where((logits_E == logits_E) & (expert_E < E), logits_E, float("-inf"))
    ahead_EE = logits_E[None, :] > logits_E[:, None]
    ahead_EE |= (logits_E[None, :] == logits_E[:, None]) & (expert_E[None, :] < expert_E[:, None])
    return tl.sum(ahead_EE.to(tl.int32), 1)


@triton.jit
def _choose(
    logits_TE,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(ids int32, softmax over K) [BLOCK_T, BLOCK_K] of the K largest logits; ids are distinct and below E <= 2^30."""
    expert_1E = tl.arange(0, BLOCK_E)[None, :]
    choice_1K = tl.arange(0, BLOCK_K)[None, :]
    lowest = float("-inf")
    logits_TE = tl.where(logits_TE == logits_TE, logits_TE, lowest)
    free_TE = (expert_1E < E) & (logits_TE >= lowest)
    ids_TK = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    top_TK = tl.full((BLOCK_T, BLOCK_K), lowest, tl.float32)
    for k in tl.static_range(K):
        top_T1 = tl.max(tl.where(free_TE, logits_TE, lowest), 1, keep_dims=True)
        id_T1 = tl.min(tl.where(free_TE & (logits_TE == top_T1), expert_1E, 1 << 30), 1, keep_dims=True)
        free_TE &= expert_1E != id_T1
        ids_TK = tl.where(choice_1K == k, id_T1, ids_TK)
        top_TK = tl.where(choice_1K == k, top_T1, top_TK)
    exp_TK = tl.where(choice_1K < K, tl.exp(top_TK - tl.max(top_TK, 1, keep_dims=True)), 0.0)
    return ids_TK, exp_TK / tl.sum(exp_TK, 1, keep_dims=True)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    y,
    router_weight,
    router_bias,
    partial,
    arrivals,
    expert_ids,
    weights,
    counts,
    ranks,
    num_tokens,
    H: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    token_T = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    expert_E = tl.arange(0, BLOCK_E)
    column_H = split * STEPS * BLOCK_H + tl.arange(0, BLOCK_H)
    y_TH = y + token_T[:, None].to(tl.int64) * H + column_H[None, :]
    router_HE = router_weight + expert_E[None, :] * H + column_H[:, None]
    live_T = token_T < num_tokens
    live_E = expert_E < E
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    bias_E = tl.load(router_bias + expert_E, mask=live_E, other=0).to(tl.float32)
    if STEPS == 1:
        inside_H = column_H < H
        b_HE = tl.load(router_HE, mask=inside_H[:, None] & live_E[None, :], other=0)
        a_TH = tl.load(after_wait(y_TH, PDL), mask=live_T[:, None] & inside_H[None, :], other=0)
        logits_TE = tl.dot(a_TH, b_HE, input_precision="ieee")
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        logits_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
        for step in tl.range(STEPS, num_stages=4):
            inside_H = column_H + step * BLOCK_H < H
            a_TH = tl.load(y_TH + step * BLOCK_H, mask=live_T[:, None] & inside_H[None, :], other=0)
            b_HE = tl.load(router_HE + step * BLOCK_H, mask=inside_H[:, None] & live_E[None, :], other=0)
            logits_TE = tl.dot(a_TH, b_HE, logits_TE, input_precision="ieee")
    last = True
    if SPLITS > 1:
        live_TE = live_T[:, None] & live_E[None, :]
        place_TE = token_T[:, None] * E + expert_E[None, :]
        tl.store(partial + split * num_tokens * E + place_TE, logits_TE, mask=live_TE)
        last = arrives_last(arrivals + tile, SPLITS)
        if last:
            tl.store(arrivals + tile, 0)
            logits_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
            for other in tl.static_range(SPLITS):
                logits_TE += tl.load(
                    partial + other * num_tokens * E + place_TE, mask=live_TE, other=0, cache_modifier=".cg"
                )
    if last:
        ids_TK, weights_TK = _choose(logits_TE + bias_E[None, :], E, K, BLOCK_T, BLOCK_E, BLOCK_K)
        choice_1K = tl.arange(0, BLOCK_K)[None, :]
        live_TK = live_T[:, None] & (choice_1K < K)
        place_TK = token_T[:, None] * K + choice_1K
        tl.store(expert_ids + place_TK, ids_TK, mask=live_TK)
        tl.store(weights + place_TK, weights_TK, mask=live_TK)
        if counts is not None:
            tl.store(ranks + place_TK, tl.atomic_add(counts + ids_TK, 1, mask=live_TK, sem="relaxed"), mask=live_TK)
