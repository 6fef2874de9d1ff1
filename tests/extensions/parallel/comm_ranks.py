"""What each rank does in test_comm_gpu.py. Each function returns a list of what is wrong, which is empty."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.kernels.inputs import sampling_batch
from benchmarks.kernels.ranks import Ranks
from oscine.extensions.parallel.comm.tokens import SymmetricExchange
from oscine.ops.embed import triton as embed
from oscine.ops.interface import Ops, SamplingBatch
from oscine.ops.norm import hopper
from oscine.ops.norm import triton as norm
from oscine.ops.planes import empty_planes, split
from oscine.ops.platforms.table import choose, resolve
from oscine.ops.target import Target

HIDDEN, EXPERTS, PER_TOKEN, EPS = 2880, 128, 4, 1e-5
ROWS = (1, 3, 8, 64, 100, 1024, 8192)
REPLAYS = 100_000
EXCHANGES = 5_000
UNEVEN = ((1, 1), (1, 3), (64, 1), (100, 17), (1024, 700), (8192, 1))  # tokens by rank


class Checks:
    """Collects what is wrong, so that all ranks go on together."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.wrong = ranks, list[str]()

    def equal(self, name: str, found: Tensor, expected: Tensor, tolerance: float = 0.0) -> None:
        """NaN equals NaN; the tolerance is relative to the largest of the row."""
        found, expected = found.float(), expected.float()
        allowed = tolerance * expected.abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True)
        same = (found == expected) | (found.isnan() & expected.isnan()) | ((found - expected).abs() <= allowed)
        if not same.all():
            where = (~same).nonzero()
            first = tuple(where[0].tolist())
            columns = where[:, -1].unique()
            self.wrong.append(
                f"{name}: {len(where)} of {same.numel()} differ, in {len(where[:, 0].unique())} rows and columns "
                f"{columns[:8].tolist()}..{columns[-1].item()}; first {first}: {found[first].item()} is not "
                f"{expected[first].item()}"
            )

    def identical(self, name: str, *tensors: Tensor) -> None:
        """On all ranks, bit for bit."""
        sums = torch.stack([_checksum(tensor) for tensor in tensors]).cpu()
        all_sums = [torch.empty_like(sums) for _ in range(self.ranks.num_ranks)]
        dist.all_gather(all_sums, sums)
        if any(not torch.equal(sums, other) for other in all_sums):
            self.wrong.append(f"{name}: ranks have other bits: {[other.tolist() for other in all_sums]}")

    def true(self, name: str, holds: object) -> None:
        if not holds:
            self.wrong.append(name)


def _checksum(tensor: Tensor) -> Tensor:
    bits = tensor.contiguous().view(-1).view(torch.int16 if tensor.itemsize == 2 else torch.int32).long()
    return (bits * (torch.arange(len(bits), device=bits.device) % 65521 + 1)).sum()


def parts(ranks: Ranks, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[Tensor]:
    """What each rank has; every rank knows all."""
    found = []
    for rank in range(ranks.num_ranks):
        generator = torch.Generator(ranks.device).manual_seed(1000 * seed + rank)
        found.append(torch.randn(shape, generator=generator, device=ranks.device).to(dtype))
    return found


def special(tensors: list[Tensor]) -> None:
    """Zeros of both signs, whole rows of them, NaN and infinities."""
    for rank, tensor in enumerate(tensors):
        flat = tensor.view(-1)
        for offset, value in ((0, 0.0), (1, -0.0), (2, 0.0)):
            flat[offset::7] = value
        if len(flat) > 16:
            flat[5 + rank] = torch.nan
            flat[11] = torch.inf
            flat[13] = torch.inf if rank else -torch.inf
        tensor[-1] = -0.0 if rank else 0.0


def add(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total


def own_kernels(ranks: Ranks) -> list[str]:
    """all_reduce, all_gather and best, one after the other on the same buffers."""
    checks, communicator = Checks(ranks), ranks.communicator(8192, HIDDEN)
    for seed in range(3):
        for rows in ROWS:
            for dtype in (torch.bfloat16, torch.float32):
                tensors = parts(ranks, (rows, HIDDEN), dtype, seed)
                if seed == 1:
                    special(tensors)
                total = communicator.all_reduce(tensors[ranks.rank])
                checks.equal(f"all_reduce {rows} {dtype} seed {seed}", total, add(tensors).to(dtype))
                checks.identical(f"all_reduce {rows} {dtype} seed {seed}", total)
        for shape in ((1, 7), (5, 33), (64, 100_544)):
            tensors = parts(ranks, shape, torch.float32, seed)
            if seed == 1:
                special(tensors)
            found = communicator.all_gather(tensors[ranks.rank])
            checks.equal(f"all_gather {shape} seed {seed}", found, torch.cat(tensors, -1))
        for rows in (1, 5, 64, 300, 1024):
            values = [tensor.round(decimals=1) for tensor in parts(ranks, (rows,), torch.float32, seed)]
            ids = [torch.randint(201_088, (rows,), device=ranks.device) for _ in values]
            dist_ids = torch.stack(ids).cpu()
            dist.broadcast(dist_ids, 0)
            ids = list(dist_ids.to(ranks.device))
            values[seed % ranks.num_ranks][1:2] = torch.nan
            if seed:
                for value, id_N in zip(values, ids, strict=True):  # no rank has a token
                    value[-1], id_N[-1] = -torch.inf, -1
            found = communicator.best(values[ranks.rank], ids[ranks.rank])
            expected, top = ids[0], values[0].nan_to_num(-torch.inf)
            for value, id_N in zip(values[1:], ids[1:], strict=True):
                expected, top = (
                    torch.where(value > top, id_N, expected),
                    torch.maximum(value.nan_to_num(-torch.inf), top),
                )
            checks.true(f"best {rows} seed {seed}: {found[:4]} {expected[:4]}", torch.equal(found, expected))
    tensors = parts(ranks, (2, HIDDEN))
    for _ in range(1000):
        total = communicator.all_reduce(tensors[ranks.rank])
    checks.equal("all_reduce 1000 times", total, add(tensors).bfloat16())
    checks.true("a poll failed", not communicator.failed.item())
    checks.true(
        "on the host", communicator.all_gather(torch.tensor([ranks.rank])).tolist() == [*range(ranks.num_ranks)]
    )
    return checks.wrong


def embeddings(ranks: Ranks) -> list[str]:
    """Of tokens of all ranks and of none, beside the norm that follows; -0.0 may be 0.0."""
    checks, target = Checks(ranks), ranks.target(8192, HIDDEN)
    generator = torch.Generator(ranks.device).manual_seed(6)
    vocab = 1000
    weight_VH = torch.randn((vocab * ranks.num_ranks, HIDDEN), generator=generator, device=ranks.device).bfloat16()
    weight_VH[:, ::7] = 0.0
    first = ranks.rank * vocab
    part_VH = weight_VH[first : first + vocab].clone()
    for rows in ROWS:
        for _ in range(3):
            ids_T = torch.randint(len(weight_VH), (rows,), generator=generator, device=ranks.device)
            ids_T[rows // 2] = -1
            x_TH = embed.embed_part(target, ids_T, part_VH, first)
            expected_TH = weight_VH[ids_T].masked_fill((ids_T < 0)[:, None], 0)
            checks.equal(f"embedding of {rows}", x_TH, expected_TH)
            checks.identical(f"embedding of {rows}", x_TH)
            summed = norm.rms_norm(target, x_TH, weight_VH[0], EPS, x_TH)[1]
            checks.equal(f"the norm after {rows}", summed, x_TH.float() * (1 + ranks.num_ranks), 2**-7)
    checks.true("a poll failed", not target.communicator.failed.item())  # type: ignore[attr-defined]
    return checks.wrong


def choices(ranks: Ranks) -> list[str]:
    """Ranks with a part of the head choose what each of them chooses with all of it, also in a graph."""
    checks, target = Checks(ranks), ranks.target(64, HIDDEN)
    generator = torch.Generator(ranks.device).manual_seed(7)
    vocab = 20_000
    weight_VH = torch.randn((vocab * ranks.num_ranks, HIDDEN), generator=generator, device=ranks.device).mul_(0.02)
    weight_VH[-1] = weight_VH[5]  # equal tokens of two ranks
    whole_VH = weight_VH.bfloat16()
    part_VH = whole_VH[ranks.rank * vocab :][:vocab].clone()
    alone, own = (resolve(one, choose("hopper")) for one in (Target.of(ranks.device), target))
    prepared = {ops: ops.chooser.prepare(head) for ops, head in ((alone, whole_VH), (own, part_VH))}
    few_KA = torch.arange(7, len(whole_VH), 997, device=ranks.device)[None]
    for rows in (1, 2, 3, 8, 9, 33, 64):
        heat_N = torch.tensor([0.0, 1.0, 0.3], device=ranks.device)[torch.arange(rows, device=ranks.device) % 3]
        for greedy in (True, False):
            x_NH = torch.randn((rows, HIDDEN), generator=generator, device=ranks.device)
            x_NH[0] = weight_VH[5] * 100
            x_NH[3:4] = torch.nan
            x_NH = x_NH.bfloat16()
            sampling = sampling_batch(rows, ranks.device, greedy=greedy, temperature_N=heat_N * (not greedy))

            def choose_by(ops: Ops, head_VH: Tensor, x_NH: Tensor = x_NH, batch: SamplingBatch = sampling) -> Tensor:
                return ops.chooser.choose(x_NH, head_VH, prepared[ops], batch)

            name = f"{rows} rows, {'greedy' if greedy else 'noise'}"
            expected = choose_by(alone, whole_VH)
            checks.true(f"{name}: one rank chooses {expected[0]}", expected[0] == 5)
            checks.true(
                f"{name}: {choose_by(own, part_VH)} is not {expected}", torch.equal(choose_by(own, part_VH), expected)
            )
            communicator: Any = target.communicator
            torch.cuda.synchronize()
            communicator.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                found = choose_by(own, part_VH)
            for _ in range(3):
                x_NH.copy_(torch.randn(x_NH.shape, generator=generator, device=ranks.device))
                graph.replay()
                expected = choose_by(alone, whole_VH)
                checks.true(f"{name}, replayed: {found} is not {expected}", torch.equal(found, expected))
        among = (
            few_KA.expand(rows, -1),
            heat_N,
            torch.randn(rows, few_KA.shape[1], generator=generator, device=ranks.device),
        )
        expected = alone.choose_few(x_NH, whole_VH, *among)
        found = own.choose_few(x_NH, part_VH, *among)
        checks.true(f"{rows} rows among few: {found} is not {expected}", torch.equal(found, expected))
    checks.true("a poll failed", not communicator.failed.item())
    return checks.wrong


def norms(ranks: Ranks) -> list[str]:
    """The three kernels that add up over ranks, against float32."""
    checks, target = Checks(ranks), ranks.target(8192, HIDDEN)
    generator = torch.Generator(ranks.device).manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=ranks.device).bfloat16()

    weight_H, router, bias_E = normal(HIDDEN), normal(EXPERTS, HIDDEN) / HIDDEN**0.5, normal(EXPERTS)
    for seed, (rows, partials) in enumerate((rows, partials) for rows in ROWS for partials in (0, 1, 4, 12)):
        if rows * partials > 1024 * 12:
            continue
        for dtype in (torch.bfloat16, torch.float32) if partials else (torch.bfloat16,):
            name = f"{rows} rows, {partials} partial sums of {dtype}"
            tensors = parts(ranks, (rows, partials, HIDDEN) if partials else (rows, HIDDEN), dtype, seed)
            if seed % 3 == 1:
                special(tensors)
            x, residual_TH = tensors[ranks.rank], normal(rows, HIDDEN)
            rounded = [add(list(tensor.unbind(1))).bfloat16() if partials else tensor for tensor in tensors]
            total = (add(rounded) + residual_TH.float()).bfloat16()
            inverse = torch.rsqrt(total.float().square().mean(-1, keepdim=True) + EPS)
            expected = total.float() * inverse * weight_H.float()

            y, found = norm.rms_norm(target, x, weight_H, EPS, residual_TH)
            checks.equal(f"rms_norm, sum, {name}", found, total)
            checks.equal(f"rms_norm, {name}", y, expected, 2**-8)
            checks.identical(f"rms_norm, {name}", y, found)

            y, found, routing = hopper.norm_route(target, x, weight_H, EPS, residual_TH, router, bias_E, PER_TOKEN)
            checks.equal(f"norm_route, sum, {name}", found, total)
            checks.equal(f"norm_route, {name}", y, expected, 2**-8)
            checks.identical(f"norm_route, {name}", y, found, routing.expert_ids_TK, routing.weights_TK)
            logits_TE = y.float() @ router.float().T + bias_E.float()
            top_TK = logits_TE.nan_to_num(-1e30).topk(PER_TOKEN).values
            mine_TK = logits_TE.nan_to_num(-1e30).gather(1, routing.expert_ids_TK.long())
            checks.equal(f"norm_route, logits of the chosen, {name}", mine_TK, top_TK, 1e-4)

            if rows <= 64:
                y, found, squares_TS, _ = norm.undivided_norm(target, x, weight_H, residual_TH)
                checks.equal(f"undivided, sum, {name}", found, total)
                checks.equal(f"undivided, {name}", y, total.float() * weight_H.float(), 2**-8)
                mean = squares_TS.sum(1, keepdim=True)
                checks.equal(f"undivided, squares, {name}", mean, total.float().square().sum(1, keepdim=True), 1e-4)
                checks.identical(f"undivided, {name}", y, found, squares_TS)
                norm.norm_route(target, x, weight_H, EPS, residual_TH, router, bias_E, PER_TOKEN)
    checks.true("a poll failed", not target.communicator.failed.item())  # type: ignore[attr-defined]
    return checks.wrong


def left_choices(ranks: Ranks) -> list[str]:
    """The norm of one token that leaves the choice of experts to the moe: its logits are those that it would choose by,
    and the same on all ranks. Of more tokens it chooses."""
    checks, target = Checks(ranks), ranks.target(8192, HIDDEN)
    generator = torch.Generator(ranks.device).manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=ranks.device).bfloat16()

    weight_H, router, bias_E = normal(HIDDEN), normal(EXPERTS, HIDDEN) / HIDDEN**0.5, normal(EXPERTS)
    for seed, partials in enumerate((0, 1, 4, 12) * 25):
        name = f"{partials} partial sums, seed {seed}"
        tensors = parts(ranks, (1, partials, HIDDEN) if partials else (1, HIDDEN), seed=seed)
        rounded = [add(list(tensor.unbind(1))).bfloat16() if partials else tensor for tensor in tensors]
        residual_TH = normal(1, HIDDEN)
        arguments = tensors[ranks.rank], weight_H, EPS, residual_TH, router, bias_E, PER_TOKEN
        y, found, routing = hopper.norm_route(target, *arguments, leave_choice=True)
        chosen_y, chosen_sum, chosen = hopper.norm_route(target, *arguments)
        assert routing.logits_TE is not None
        checks.equal(f"sum, {name}", found, (add(rounded) + residual_TH.float()).bfloat16())
        checks.equal(f"sum of the one that chooses, {name}", found, chosen_sum)
        checks.equal(f"norm, {name}", y, chosen_y)
        checks.equal(f"logits, {name}", routing.logits_TE, y.float() @ router.float().T + bias_E.float(), 1e-4)
        top = routing.logits_TE.topk(PER_TOKEN)
        checks.equal(f"weights, {name}", chosen.weights_TK, top.values.softmax(-1), 1e-5)
        checks.true(f"{name}: {chosen.expert_ids_TK} is not {top.indices}", (chosen.expert_ids_TK == top.indices).all())
        checks.identical(name, y, found, routing.logits_TE)
    x, residual_TH = parts(ranks, (2, HIDDEN))[ranks.rank], normal(2, HIDDEN)
    routing = hopper.norm_route(target, x, weight_H, EPS, residual_TH, router, bias_E, PER_TOKEN, leave_choice=True)[2]
    checks.true("two tokens are left to the moe", routing.logits_TE is None)
    checks.true("a poll failed", not target.communicator.failed.item())  # type: ignore[attr-defined]
    return checks.wrong


@triton.jit
def _spin_kernel(delays, step):
    """As many ns as step says, of 1024 delays."""
    delay = tl.load(delays + (tl.load(step) & 1023)).to(tl.int64)
    begin = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - begin < delay:
        pass


class Replayed:
    """A graph of a few layers whose inputs differ in each replay, and which compares on the device."""

    def __init__(self, ranks: Ranks, target: Any, rows: int, partials: int, delays: Tensor) -> None:
        device = ranks.device
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.differing = torch.zeros(1, dtype=torch.int64, device=device)
        tensors = parts(ranks, (rows, partials, HIDDEN), torch.bfloat16, rows)
        scales = 2.0 ** torch.randint(-3, 4, (1024,), generator=torch.Generator().manual_seed(3))
        scales = scales.to(device).bfloat16()
        residual_TH = parts(ranks, (rows, HIDDEN), seed=9)[0]
        weight_H, bias_E = torch.ones(HIDDEN, device=device).bfloat16(), torch.zeros(EXPERTS, device=device).bfloat16()
        router = parts(ranks, (EXPERTS, HIDDEN), seed=8)[0]
        tokens = parts(ranks, (100, HIDDEN), seed=7)  # a rank has the rows of 100
        table_VH, place_T = torch.cat(tokens), torch.arange(rows, device=device)

        def experts(x: Tensor) -> Tensor:
            if partials % 2 == 0 and rows <= 64:
                return norm.undivided_norm(target, x, weight_H, residual_TH)[1]
            return norm.rms_norm(target, x, weight_H, EPS, residual_TH)[1]

        def attention(x: Tensor) -> Tensor:
            arguments = x, weight_H, EPS, residual_TH, router, bias_E, PER_TOKEN
            return norm.norm_route(target, *arguments, leave_choice=rows == 1)[1]  # as layers do

        def run() -> None:
            scaled = [tensor * scales[self.step & 1023] for tensor in tensors]  # powers of two: exact
            expected = (
                add([add(list(tensor.unbind(1))).bfloat16() for tensor in scaled]) + residual_TH.float()
            ).bfloat16()
            ids_T = (7 * self.step + 31 * place_T) % len(table_VH)
            x_TH = embed.embed_part(target, ids_T, tokens[ranks.rank], 100 * ranks.rank)
            self.differing += (x_TH != table_VH[ids_T]).sum()
            for layer in range(4):
                for sum_up in (attention, experts):
                    if layer % 2:
                        _spin_kernel[(1,)](delays, self.step, num_warps=1)
                    self.differing += (sum_up(scaled[ranks.rank]) != expected).sum()
            self.step += 1

        run()
        torch.cuda.synchronize()
        communicator: Any = target.communicator
        communicator.barrier()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            run()
        self.run = run  # keeps its inputs: the graph has only their addresses


def replays(ranks: Ranks) -> list[str]:
    """Graphs of several sizes, replayed in a random order that is the same on all ranks, with other delays on each."""
    target = ranks.target(256, HIDDEN)
    communicator: Any = target.communicator
    generator = torch.Generator().manual_seed(ranks.rank)
    delays = torch.randint(0, 6000, (1024,), generator=generator)
    delays[::97] = 100_000
    delays = delays.to(ranks.device, torch.int32)
    graphs = [Replayed(ranks, target, rows, partials, delays) for rows, partials in ((1, 4), (3, 3), (100, 2))]
    communicator.barrier()
    communicator.set_limit(1.5)
    order = torch.randint(0, 20, (REPLAYS,), generator=torch.Generator().manual_seed(1)).tolist()
    begin = time.monotonic()
    for index, chosen in enumerate(order):
        graphs[max(0, chosen - 17)].graph.replay()
        if index % 1000 == 999:
            differing = [graph.differing.item() for graph in graphs]
            if any(differing) or communicator.failed.item():
                return [f"by replay {index + 1}: differing elements {differing}, failed {communicator.failed.item()}"]
            if index % 20_000 == 19_999:
                print(f"{index + 1} replays in {time.monotonic() - begin:.1f} s", flush=True)
    return []


def exchanged(ranks: Ranks) -> list[str]:
    """Tokens at the experts of all ranks and sums back at their own, against float32: steps of uneven sizes, and graphs
    between them, with other delays on each rank."""
    checks, exchange = Checks(ranks), SymmetricExchange(ranks.communicator(8192, HIDDEN))
    for seed, tokens in enumerate(UNEVEN * 2):
        tokens = (*tokens, *(3,) * ranks.num_ranks)[: ranks.num_ranks]
        for tokens_of_all in (tokens, tokens[::-1]):
            _check_exchange(checks, exchange, tokens_of_all, seed)
    if not checks.wrong:
        _replay_exchanges(checks, exchange)
    checks.true("a poll failed", not exchange.failed.item())  # type: ignore[union-attr]
    return checks.wrong


def _check_exchange(checks: Checks, exchange: SymmetricExchange, tokens: tuple[int, ...], seed: int) -> None:
    ranks, name = checks.ranks, f"{tokens}, seed {seed}"
    exchange.tokens = tokens
    num_tokens = sum(tokens)
    rows = [parts(ranks, (count, HIDDEN), seed=seed)[rank] for rank, count in enumerate(tokens)]
    if seed % 2:
        special(rows)
    counts_E = torch.full((EXPERTS,), 7, dtype=torch.int32, device=ranks.device)
    number = 1 + seed // 2 % 2
    planes = empty_planes(number, num_tokens, HIDDEN, ranks.device) if num_tokens <= 256 else None
    all_nH = exchange.dispatch(rows[ranks.rank], counts_E, planes)
    checks.equal(f"tokens, {name}", all_nH, torch.cat(rows))
    checks.true(f"counts, {name}", not counts_E.any())
    if planes is not None and not seed % 2:  # infinities have none
        for found, expected in zip(planes, split(Target.of(ranks.device), all_nH, number), strict=True):
            checks.equal(f"{number} planes, {name}", found, expected)
    begin = sum(tokens[: ranks.rank])
    for partials in (0, 1, 4, 12):
        shape = (num_tokens, partials, HIDDEN) if partials else (num_tokens, HIDDEN)
        if num_tokens * partials > 16_384:
            continue
        sums = parts(ranks, shape, seed=seed)
        if seed % 2:
            special(sums)
        rounded = [add(list(one.unbind(1))).bfloat16() if partials else one for one in sums]
        found = exchange.combine(sums[ranks.rank])
        expected = add(rounded)[begin : begin + tokens[ranks.rank]]
        checks.equal(f"{partials} sums, {name}", found, expected)
        exchange.dispatch(rows[ranks.rank], None, None)  # the two take turns
    exchange.combine(all_nH)


class Exchanged:
    """A graph of a few layers of one size on all ranks, whose inputs differ in each replay; it compares by itself."""

    def __init__(self, ranks: Ranks, exchange: SymmetricExchange, size: int, delays: Tensor) -> None:
        device, num_ranks = ranks.device, ranks.num_ranks
        self.tokens = (size,) * num_ranks
        self.step, self.differing = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        rows = parts(ranks, (size, HIDDEN), seed=size)
        sums = parts(ranks, (size * num_ranks, 4, HIDDEN), seed=size + 1)
        scales = 2.0 ** torch.randint(-3, 4, (1024,), generator=torch.Generator().manual_seed(3))
        scales = scales.to(device).bfloat16()
        mine = slice(size * ranks.rank, size * (ranks.rank + 1))

        def run() -> None:
            scale = scales[self.step & 1023]  # a power of two: exact
            rounded = [add(list((one * scale).unbind(1))).bfloat16() for one in sums]
            expected, all_rows = add(rounded)[mine], torch.cat(rows) * scale
            for layer in range(4):
                if layer % 2:
                    _spin_kernel[(1,)](delays, self.step, num_warps=1)
                all_nH = exchange.dispatch(rows[ranks.rank] * scale, None, None)
                self.differing += (all_nH != all_rows).sum()
                if layer % 3 == 0:
                    _spin_kernel[(1,)](delays, self.step + 500, num_warps=1)
                self.differing += (exchange.combine(sums[ranks.rank] * scale) != expected).sum()
            self.step += 1

        exchange.tokens = self.tokens
        run()
        torch.cuda.synchronize()
        dist.barrier()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            run()
        self.run = run  # keeps its inputs: the graph has only their addresses


def _replay_exchanges(checks: Checks, exchange: SymmetricExchange) -> None:
    """In a random order that all ranks have; steps of other sizes come between."""
    ranks = checks.ranks
    delays = torch.randint(0, 6000, (1024,), generator=torch.Generator().manual_seed(ranks.rank))
    delays[::97] = 100_000
    delays = delays.to(ranks.device, torch.int32)
    graphs = [Exchanged(ranks, exchange, size, delays) for size in (1, 8, 128)]
    dist.barrier()
    exchange.serve()
    order = torch.randint(0, len(graphs), (EXCHANGES,), generator=torch.Generator().manual_seed(1)).tolist()
    begin = time.monotonic()
    for index, chosen in enumerate(order):
        exchange.tokens = graphs[chosen].tokens
        graphs[chosen].graph.replay()
        if index % 500 == 499:
            _check_exchange(checks, exchange, (1 + index % 7, *(5,) * (ranks.num_ranks - 1)), index)
            differing = [graph.differing.item() for graph in graphs]
            checks.true(f"by replay {index + 1}: differing elements {differing}", not any(differing))
            if checks.wrong:
                break
    print(f"{len(order)} replays in {time.monotonic() - begin:.1f} s", flush=True)


def deserted(ranks: Ranks) -> list[str]:
    """The last rank does not come to a step. The others end their waits, and send it no sums of what they computed."""
    checks, communicator = Checks(ranks), ranks.communicator(256, HIDDEN)
    exchange, x = SymmetricExchange(communicator), parts(ranks, (64, HIDDEN))[0]
    exchange.tokens = (64,) * ranks.num_ranks

    def layer() -> None:
        exchange.combine(exchange.dispatch(x, None, None))

    layer()
    torch.cuda.synchronize()
    dist.barrier()
    communicator.set_limit(0.5)
    late = ranks.rank == ranks.num_ranks - 1
    if late:
        time.sleep(2)
        checks.true("failed is set where nothing was polled", communicator.failed.item() == 0)
    seconds = [_seconds(layer) for _ in range(2)]
    print("seconds", seconds, flush=True)
    checks.true(f"the limit is 0.5 s: {seconds}", 0.4 < seconds[0] < 2)
    checks.true(f"later polls end at once: {seconds}", seconds[1] < 0.3)
    checks.true("failed is not set", communicator.failed.item() == 1)
    dist.barrier()
    return checks.wrong


def dead_peer(ranks: Ranks) -> list[str]:
    """The last rank does not take part: the polls of the others end, and later ones at once."""
    checks, target = Checks(ranks), ranks.target(256, HIDDEN)
    communicator: Any = target.communicator
    x, weight_H = parts(ranks, (64, HIDDEN))[0], torch.ones(HIDDEN, device=ranks.device).bfloat16()
    router, bias_E = parts(ranks, (EXPERTS, HIDDEN))[0], weight_H[:EXPERTS]

    def calls(rows: int) -> None:
        norm.rms_norm(target, x[:rows], weight_H, EPS, x[:rows])
        norm.norm_route(target, x[:rows], weight_H, EPS, x[:rows], router, bias_E, PER_TOKEN)

    for rows in (1, 64):
        calls(rows)
    torch.cuda.synchronize()
    communicator.barrier()
    communicator.set_limit(1.5)
    if ranks.rank < ranks.num_ranks - 1:
        seconds = [_seconds(lambda rows=rows: calls(rows)) for rows in (1, 64, 1)]
        print("seconds", seconds, flush=True)
        checks.true(f"the limit is 1.5 s: {seconds}", 1.4 < seconds[0] < 4)
        checks.true(f"later polls end at once: {seconds}", max(seconds[1:]) < 0.5)
        checks.true("failed is not set", communicator.failed.item() == 1)
    else:
        time.sleep(5)
        checks.true("failed is set where nothing was polled", communicator.failed.item() == 0)
    communicator.barrier()
    return checks.wrong


def _seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.monotonic()
    call()
    torch.cuda.synchronize()
    return time.monotonic() - begin
