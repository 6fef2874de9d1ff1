"""An EAGLE-3 head with the shape of NVIDIA's EAGLE3-v3 and random weights: its ops, its drafts, and an engine with it.

    python -m benchmarks.draft                                   gpt-oss-120b on one GPU: ops and drafts
    python -m benchmarks.draft --parts engine --acceptance 20,10,5 --acceptance 62,40,25 --acceptance 90,80,70 \
        --k 0,1,2,3,c --concurrency 1,8,64,256 --isl 256 --rounds 2 --output benchmarks/results/speculation.jsonl
    python -m benchmarks.draft --model nano --device cpu --parts engine --concurrency 1,2 --isl 32 --osl 16

1. Ops: products, choice and state against the reference. Exits with 1 if an error is larger than bfloat16 explains.
2. Drafts: K tokens for some sequences, by replays of CUDA graphs. The target has two layers, which drafts do not read.
3. Engine: decode speed per user, plain and with K drafts or the controller's number of them. The drafts of a random
   head are never accepted. So --acceptance sets the share of steps (%) that accept each position: the device replaces
   the samples of the target. This takes one small launch per step, and the answers mean nothing; rows say
   "synthetic". It may be given several times. The embedded model has its own head.

The engines with and without a head are in one process and share their weights. They run in turns, so that a falling
clock affects both. K = 0 measures plain steps of the engine with the head. At the end the controller is compared with
the best fixed number of drafts, which may be 0. With --one-engine there is no engine without a head, whose steps are
then those of K = 0: for 120b on 80 GB.

Ops, drafts and engines run in a process of their own each.
"""

import argparse
import gc
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.draft_head import Always, ForcedAcceptance, Rates, forced, model_options, write_head
from benchmarks.kernels.inputs import sampling_batch
from oscine.checkpoint.opened import OpenedModel, open_model
from oscine.engine.build import build_engine
from oscine.engine.core.extension import EngineExtension, MakeExtension
from oscine.engine.core.request import Request
from oscine.executor.batch.device_state import DeviceState
from oscine.executor.kv.memory import DeviceMemory
from oscine.executor.start.build import BuiltExecutor
from oscine.executor.start.device_memory import device_memory
from oscine.extensions.bench.machine import Machine, describe
from oscine.extensions.bench.passes import OwnEngine
from oscine.extensions.bench.result import Point
from oscine.extensions.bench.timer import seconds_on_gpu
from oscine.extensions.speculation.eagle.checkpoint import open_head
from oscine.extensions.speculation.eagle.drafter import EagleDrafter
from oscine.extensions.speculation.eagle.find import OF_NANO, DraftHead
from oscine.extensions.speculation.ops import reference
from oscine.extensions.speculation.ops.interface import DraftOps, DraftState, SliceOfHead
from oscine.extensions.speculation.ops.table import backend_of, resolve_draft
from oscine.extensions.speculation.policy import of_engine
from oscine.model.config import ModelConfig
from oscine.model.gpt_oss import GptOss
from oscine.model.weights import Weights, load_weights
from oscine.ops.interface import Batch
from oscine.ops.packed import PackedSizes, PackedStep
from oscine.ops.platforms.table import choose, platform_of, resolve
from oscine.ops.target import Target
from oscine.settings.config import CacheOptions, EngineOptions, SchedulerOptions, SpeculationOptions
from oscine.types import StepPlan

SEQUENCES = (1, 8, 32)
CONTEXT, PAGE = 1024, 64  # tokens
REPLAYS = 200
MAX_DRAFTS = 3
ERROR = 0.01  # of sums in bfloat16, relative to the norm of all results
CONCURRENCY = "1,8,32,64,256"
PARTS = "ops", "drafts", "engine"


# 1. Ops


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def check_products(ops: DraftOps, backend: str, target: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Prints errors against the weights as they were prepared, and as they were published."""
    hidden, good = target.hidden_size, True
    queries = target.num_attention_heads * target.head_dim
    keys = target.num_key_value_heads * target.head_dim
    shapes = {
        "qkv": (queries + 2 * keys, 2 * hidden),
        "out": (hidden, queries),
        "gate and up": (12 * hidden, hidden),
        "down": (hidden, 6 * hidden),
        "combine": (hidden, 3 * hidden),
    }
    for name, (rows, columns) in shapes.items():
        published = torch.randn(rows, columns, device=device) / columns**0.5
        prepared = ops.prepare(published, dtype)
        exact = _as_prepared(backend, prepared, published)
        for tokens in (1, 4, 8, 32, 256):
            x = torch.randn(tokens, columns, device=device).to(dtype)
            expected = x.double() @ exact.double().T
            errors = [
                relative_error(ops.linear(x, prepared), expected),
                relative_error(_added(ops.sums(x, prepared)), expected),
            ]
            if name == "gate and up":
                gate, value = expected.chunk(2, 1)
                errors.append(relative_error(ops.gated(x, prepared), silu(gate) * value))
            lost = relative_error(expected, x.double() @ published.double().T)
            good &= max(errors) < ERROR
            print(f"{name:12} {tokens:4} rows   error {max(errors):.1e}   of the weights {lost:.1%}", flush=True)
    return good


def _added(sums: Tensor) -> Tensor:
    return sums.sum(1) if sums.dim() == 3 else sums


def _as_prepared(backend: str, prepared: Any, published: Tensor) -> Tensor:
    if backend != "triton":
        return published
    from oscine.extensions.speculation.ops.weights import unpack

    return unpack(prepared)


def check_choice(ops: DraftOps, backend: str, target: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """A token may differ from the reference's where two are as good as equal: its score is then as good."""
    rows, hidden, good = min(32768, target.vocab_size), target.hidden_size, True
    published = torch.randn(rows, hidden, device=device) / hidden**0.5
    prepared, ids_U = ops.prepare(published, dtype), torch.randperm(target.vocab_size, device=device)[:rows]
    exact = _as_prepared(backend, prepared, published).float()
    for tokens in (1, 4, 8, 32):
        x = torch.randn(tokens, hidden, device=device).to(dtype)
        heat = torch.arange(tokens, device=device) % 3 / 2
        sampling = sampling_batch(tokens, device, temperature_N=heat)
        found = ops.choose(x, SliceOfHead(prepared, ids_U), sampling)
        expected = reference.choose(x.float(), SliceOfHead(exact, ids_U), sampling)
        same = float((found == expected).float().mean())
        good &= same > 0.95
        print(f"choose       {tokens:4} rows   {same:.0%} as the reference", flush=True)
    return good


def check_state(ops: DraftOps, hidden: int, device: torch.device, dtype: torch.dtype) -> bool:
    """One sequence with two drafts, of which one is accepted, and one without."""
    sizes = PackedSizes(4, 2, 4, 4)
    packed = PackedStep.of(torch.zeros(sizes.total, dtype=torch.int32), sizes)
    packed.given_T[:] = torch.tensor([-1, -2, -3, -1])
    packed.logits_rows_N[:] = torch.arange(4)
    packed.sampled_slots_M[:] = torch.tensor([2, 2, 2, 0])
    packed = PackedStep(*(column.to(device) for column in packed))
    positions = torch.arange(10, 14, device=device)
    batch = Batch(positions, positions, positions, positions, (), None)
    features = torch.randn(4, hidden, device=device).to(dtype)
    ids, slots = torch.tensor([5, 6, -2, 7], device=device), torch.tensor([2, 0], dtype=torch.int32, device=device)
    results = []
    for backend in (ops, reference):
        state = DraftState(
            features=torch.zeros(4, hidden, dtype=dtype, device=device),
            lens=torch.ones(4, dtype=torch.int32, device=device),
            temperatures=torch.arange(4, device=device) / 4,
            seeds=torch.arange(4, device=device) << 33,
        )
        drafts = torch.zeros(4, MAX_DRAFTS, dtype=torch.int32, device=device)
        next_ids = backend.hold(packed, batch, ids, features, state)
        noise = backend.sampling(slots, positions[:2], state)
        backend.put(drafts, 1, slots, positions[:2])
        kept = state.features[:3], state.lens[:3], backend.held(slots, state)
        results.append((next_ids, drafts, *kept, noise.temperature_N, noise.seed_N, noise.position_N))
    good = all(torch.equal(found, expected) for found, expected in zip(*results, strict=True))
    print(f"hold, held, sampling, put   {'as the reference' if good else 'WRONG'}", flush=True)
    return good


def check_forced(device: torch.device) -> bool:
    """The kernel that forces acceptance against the formula, on sequences of 0 to 3 drafts behind each other."""
    from benchmarks.kernels.forced import forced as kernel

    counts = torch.arange(64) % (MAX_DRAFTS + 1)
    places = torch.cat([torch.arange(count + 1) for count in counts.tolist()])
    rows = len(places)
    sizes = PackedSizes(rows, len(counts), rows, rows)
    packed = PackedStep.of(torch.zeros(sizes.total, dtype=torch.int32), sizes)
    packed.given_T[:], packed.logits_rows_N[:] = -1 - places, torch.arange(rows)
    packed.sampled_slots_M[:] = torch.repeat_interleave(torch.arange(64), counts + 1)
    packed = PackedStep(*(column.to(device) for column in packed))
    tokens, positions = torch.randint(1000, (2, rows), device=device)
    batch, ids_M = Batch(tokens, positions, positions, positions, (), None), tokens.roll(-1) * (tokens % 2)
    chance_K = torch.tensor([0.7, 0.6, 0.5, 0.0], device=device)
    good = torch.equal(kernel(packed, batch, ids_M, chance_K), forced(packed, batch, ids_M, chance_K))
    print(f"forced acceptance   {'as its formula' if good else 'WRONG'}", flush=True)
    return good


def check_ops(model: str, device: str) -> bool:
    with torch.inference_mode():
        torch.manual_seed(0)
        opened = open_model(model_options(model, device))
        target, platform = opened.config, platform_of(Target.of(opened.device), opened.dtype)
        ops, backend = resolve_draft(Target.of(opened.device), platform), backend_of(platform)
        where = opened.device, opened.dtype
        good = check_products(ops, backend, target, *where)
        good &= check_choice(ops, backend, target, *where)
        good &= opened.device.type == "cpu" or check_forced(opened.device)
        return check_state(ops, target.hidden_size, *where) and good


# 2. Drafts


def random_drafter(opened: OpenedModel, folder: Path, most_sequences: int) -> EagleDrafter:
    """Sequences in slots 0, 1, 2 ... with pages of their own, as after a step of the target."""
    device, dtype, groups = opened.device, opened.dtype, opened.config.kv_groups(PAGE, str(opened.dtype)[6:])
    target = Target.of(device)
    platform = platform_of(target, dtype)
    ops, layers = resolve(target, choose(platform.name)), opened.config.of_layers((0, 1))
    model = GptOss(layers, load_weights(layers, opened.source, device, dtype, ops=ops), ops)
    found = DraftHead(open_head(folder, opened.config), opened.config.num_hidden_layers)
    head = found.load(opened, model, resolve_draft(target, platform))
    length = CONTEXT + MAX_DRAFTS
    state = DeviceState(most_sequences, length, PAGE, len(groups), device, ops, MAX_DRAFTS)
    columns = -(-length // PAGE)
    slots, numbers = np.repeat(np.arange(most_sequences), columns), np.arange(1, most_sequences * columns + 1)
    state.update_pages([slots.tolist(), ((numbers - 1) % columns).tolist(), *[numbers.tolist()] * len(groups)])
    group = groups[found.group(groups)]
    pages = torch.zeros(len(numbers) + 1, 2, group.num_kv_heads, PAGE, group.head_dim, dtype=dtype, device=device)
    drafter = EagleDrafter(head, state, pages, found.group(groups), records=platform.has_c_kernels)
    held: DraftState = drafter._held
    held.features.normal_()
    held.lens.fill_(CONTEXT)
    held.temperatures[::2] = 1
    return drafter


def time_drafts(model: str, device: str) -> None:
    opened = open_model(model_options(model, device))
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        write_head(Path(folder), opened.config)
        drafter = random_drafter(opened, Path(folder), max(SEQUENCES))
        if opened.device.type == "cuda":
            drafter.run_eagerly([*SEQUENCES], MAX_DRAFTS)
            drafter.capture([*SEQUENCES], MAX_DRAFTS)
        for sequences in SEQUENCES:
            times = [f"K={k} {_draft_ms(drafter, sequences, k):.3f} ms" for k in range(1, MAX_DRAFTS + 1)]
            print(f"{sequences:3} sequences   {'   '.join(times)}", flush=True)


def _draft_ms(drafter: EagleDrafter, sequences: int, num_drafts: int) -> float:
    """Median; of the graph alone, where there is one."""
    asked = np.arange(sequences), np.full(sequences, num_drafts), np.full(sequences, CONTEXT + MAX_DRAFTS - 1)
    drafter.draft(*asked)
    graph = drafter._graphs.get((sequences, num_drafts))
    if graph is not None:
        torch.cuda.synchronize()
        return 1e3 * median(seconds_on_gpu(graph[1].replay) for _ in range(REPLAYS))
    seconds = []
    for _ in range(REPLAYS // 10):
        began_s = time.perf_counter()
        drafter.draft(*asked)
        seconds.append(time.perf_counter() - began_s)
    return 1e3 * median(seconds)


# 3. The engine


@dataclass(frozen=True)
class Job:
    """Two engines, and what they are measured at."""

    model: str
    device: str
    ks: tuple[int | None, ...]  # drafts; None: the controller's number of them
    head: str  # folder
    forced: tuple[Rates, ...]  # rates by position that are measured; if empty, acceptance is not forced
    concurrency: tuple[int, ...]
    isl: int
    osl: int
    rounds: int
    step_tokens: int
    one_engine: bool

    @property
    def variants(self) -> list[tuple[Rates | None, int | None]]:
        """Pairs of acceptance and drafts; without drafts, acceptance does not matter."""
        forced = self.forced or (None,)
        return [(rates, k) for rates in forced for k in self.ks if k != 0 or rates == forced[0]]

    @property
    def points(self) -> list[Point]:
        return [Point(concurrency, self.isl, self.osl) for concurrency in self.concurrency]


@dataclass(frozen=True)
class Measured:
    """One pass."""

    tok_s_user: float
    acceptance_length: float  # tokens of a sequence per step


@dataclass(frozen=True)
class Compared:
    """Passes of both engines in turns."""

    concurrency: int
    forced: Rates | None
    k: int | None
    plain: list[Measured]  # by round
    drafting: list[Measured]

    @property
    def ratios(self) -> list[float]:
        return [ours.tok_s_user / plain.tok_s_user for plain, ours in zip(self.plain, self.drafting, strict=True)]


class Switched(EngineExtension):
    """Another policy for each pass."""

    def __init__(self, policy: EngineExtension) -> None:
        self.policy = policy

    def first_token(self, request: Request) -> None:
        self.policy.first_token(request)

    def before_step(self, running: Collection[Request]) -> None:
        self.policy.before_step(running)

    def after_drafts(self, request: Request, most: int, num_drafted: int, num_accepted: int) -> None:
        self.policy.after_drafts(request, most, num_drafted, num_accepted)

    def after_step(self, plan: StepPlan, num_drafted: int, seconds: float, *, in_vain: bool) -> None:
        self.policy.after_step(plan, num_drafted, seconds, in_vain=in_vain)


def switched(built: BuiltExecutor, options: EngineOptions) -> MakeExtension:
    make = of_engine(built, options)
    return lambda loop: Switched(make(loop))


def switch_of(engine: OwnEngine) -> Switched:
    (found,) = (one for one in engine.loop.extensions if isinstance(one, Switched))
    return found


def kv_cache_bytes(job: Job, options: EngineOptions) -> int:
    """Bytes for all sequences of the largest point, and the head's layer; a tenth is spare."""
    config, length = open_model(options.model).config, job.isl + job.osl + MAX_DRAFTS
    full, sliding = config.kv_groups(PAGE, "bfloat16" if job.device != "cpu" else "float32")
    sequences, chunk = max(job.concurrency), -(-options.scheduler.max_num_batched_tokens // PAGE)
    held = sequences * (sliding.window_pages + 1) + 2 * chunk
    return int(1.1 * (sequences * -(-length // PAGE) * full.page_bytes + held * sliding.page_bytes))


@contextmanager
def shared_weights() -> Iterator[None]:
    """Engines that are built meanwhile have the weights of the first one, which count as free in their plans."""
    load = OpenedModel.load
    found: list[Weights] = []

    def load_once(self: OpenedModel, **how: Any) -> Weights:
        if not found:
            found.append(load(self, **how))
        return found[0]

    def beside_weights(device: torch.device, options: EngineOptions, held: int = 0) -> DeviceMemory:
        return device_memory(device, options, held or torch.cuda.memory_allocated(device))

    plans = [patch(f"oscine.executor.start.{name}.device_memory", beside_weights) for name in ("shared", "plan")]
    with patch.object(OpenedModel, "load", load_once), plans[0], plans[1]:
        yield


def measure(job: Job) -> list[Compared]:
    # Recorded steps of a CPU have calls of the C library alone.
    graphs = not job.forced or job.device != "cpu"
    most = max(job.concurrency)
    model = replace(model_options(job.model, job.device), max_model_len=job.isl + job.osl + MAX_DRAFTS)
    step = max(most, job.step_tokens)
    scheduler = SchedulerOptions(max_num_seqs=most, max_num_batched_tokens=step, max_waiting=most)
    options = EngineOptions(model, scheduler=scheduler, cuda_graphs=graphs, quiet=True)
    cache = CacheOptions(prefix_caching=False, kv_cache_bytes=kv_cache_bytes(job, options), gpu_memory_utilization=0.97)
    options = replace(options, cache=cache)
    with shared_weights():
        no_head = replace(options, speculation=SpeculationOptions(method="none"))
        plain = None if job.one_engine else OwnEngine(build_engine(no_head))
        acceptance = ForcedAcceptance(job.device, MAX_DRAFTS) if job.forced else None
        speculation = SpeculationOptions(method="eagle3", model=job.head, max_drafts=MAX_DRAFTS)
        drafting = OwnEngine(build_engine(replace(options, speculation=speculation), speculation=switched))
    gc.collect()
    gc.freeze()  # as the engine process does
    policy = switch_of(drafting).policy
    learnt = {rates: deepcopy(policy) for rates in job.forced or (None,)}  # kept from point to point
    found: list[Compared] = []
    for point in job.points:
        found += compare(plain, drafting, point, job, learnt, acceptance)
        print("\n".join(map(line, found[-len(job.variants) :])), flush=True)
    return found


def compare(
    plain: OwnEngine | None,
    drafting: OwnEngine,
    point: Point,
    job: Job,
    learnt: Mapping[Rates | None, EngineExtension],
    acceptance: ForcedAcceptance | None,
) -> list[Compared]:
    """`learnt`: the controller for each acceptance."""
    of_plain: list[Measured] = []
    found = {variant: list[Measured]() for variant in job.variants}
    for _ in range(job.rounds):
        switch_of(drafting).policy = Always(0)
        of_plain.append(_measure(plain or drafting, point))
        for (rates, k), measured in found.items():
            if acceptance is not None and rates is not None:
                acceptance.set(rates)
            switch_of(drafting).policy = learnt[rates] if k is None else Always(k)
            measured.append(_measure(drafting, point))
    return [Compared(point.concurrency, *variant, of_plain, measured) for variant, measured in found.items()]


def _measure(engine: OwnEngine, point: Point) -> Measured:
    accepted = engine.loop.counters.accepted_tokens
    timing = engine.run(point)
    accepted = engine.loop.counters.accepted_tokens - accepted
    tokens = point.concurrency * (point.osl - 1)  # after the first
    speed = (point.osl - 1) / (timing.full_s - timing.first_s)
    return Measured(speed, tokens / (tokens - accepted))


def line(one: Compared) -> str:
    plain, ours = (median(passed.tok_s_user for passed in passes) for passes in (one.plain, one.drafting))
    length = median(passed.acceptance_length for passed in one.drafting)
    return (
        f"K {_k(one)!s:4} {one.concurrency:4} sequences  tok/s per user {plain:7.1f} plain, {ours:7.1f} with drafts  "
        f"ratio {_ratio(one):5.3f} ({', '.join(f'{ratio:.3f}' for ratio in one.ratios)})  "
        f"{length:.2f} tokens per step ({_acceptance(one.forced)})"
    )


def summary(found: Sequence[Compared]) -> Iterator[str]:
    """Per concurrency: plain steps with a head over those without; per acceptance: speeds over plain, in the order of
    the numbers of drafts, and the controller's over the best of them."""
    for concurrency in dict.fromkeys(one.concurrency for one in found):
        here = [one for one in found if one.concurrency == concurrency]
        plain = median(passed.tok_s_user for passed in here[0].plain)
        without_drafts = "".join(f"   with a head, without drafts {_ratio(one):.3f}" for one in here if one.k == 0)
        yield f"{concurrency:4} sequences   plain {plain:.1f} tok/s per user{without_drafts}"
        for rates in dict.fromkeys(one.forced for one in here):
            of_fixed = {one.k: _ratio(one) for one in here if one.k and one.forced == rates}
            chosen = [_ratio(one) for one in here if one.k is None and one.forced == rates]
            best = max([1.0, *of_fixed.values()])
            fixed = "  ".join(f"K {k} {ratio:.3f}" for k, ratio in of_fixed.items())
            choice = "".join(f"  controller {ratio:.3f}, of the best {ratio / best:.3f}" for ratio in chosen)
            yield f"     {_acceptance(rates):22} {fixed}{choice}"


def _ratio(one: Compared) -> float:
    return median(one.ratios)


def _acceptance(rates: Rates | None) -> str:
    return "measured" if rates is None else f"synthetic {'/'.join(f'{rate:.0%}' for rate in rates)}"


def _k(one: Compared) -> int | str:
    return f"0-{MAX_DRAFTS}" if one.k is None else one.k


def row(job: Job, where: Machine, one: Compared) -> dict[str, Any]:
    return {
        "model": "oscine-nano" if job.model == "nano" else f"gpt-oss-{job.model} random",
        "method": "eagle3",
        "k": _k(one),
        "concurrency": one.concurrency,
        "acceptance": "measured" if one.forced is None else "synthetic",
        **({} if one.forced is None else {"forced": one.forced}),
        "mean_acceptance_length": round(median(passed.acceptance_length for passed in one.drafting), 3),
        "tok_s_user": round(median(passed.tok_s_user for passed in one.drafting), 1),
        "plain_tok_s_user": round(median(passed.tok_s_user for passed in one.plain), 1),
        "ratio": round(median(one.ratios), 3),
        "ratios": [round(ratio, 3) for ratio in one.ratios],
        "isl": job.isl,
        "osl": job.osl,
        "gpu": where.gpu,
        "commit": where.commit,
        "date": where.date,
    }


def run_engines(job: Job, output: Path | None) -> None:
    where, target = describe(job.device, None), open_model(model_options(job.model, "cpu")).config
    with tempfile.TemporaryDirectory() as folder:
        if job.model != "nano":
            write_head(Path(folder), target)
        found = alone(measure, replace(job, head=str(OF_NANO) if job.model == "nano" else folder))
    print("\n" + "\n".join(summary(found)))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("a") as file:
            file.writelines(json.dumps(row(job, where, one)) + "\n" for one in found)


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls it in a process of its own, which gives its memory back."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="120b", choices=("120b", "20b", "nano"), help="(default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument(
        "--parts", type=parts, default=PARTS[:2], help=f"of {','.join(PARTS)} (default: {','.join(PARTS[:2])})"
    )
    parser.add_argument(
        "--acceptance",
        type=rates,
        action="append",
        default=[],
        help="%% of steps that accept each draft, for example 73,52,36 (more than once: each)",
    )
    parser.add_argument(
        "--k",
        type=drafts,
        default=(1, MAX_DRAFTS, None),
        metavar="K,...",
        help=f"drafts per step, c for the controller's (default: 1,{MAX_DRAFTS},c)",
    )
    parser.add_argument("--concurrency", type=numbers, default=CONCURRENCY, help="of engines (default: %(default)s)")
    parser.add_argument("--isl", type=int, default=1024, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--osl", type=int, default=256, help="generated tokens of a request (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="passes of each, in turns (default: %(default)s)")
    parser.add_argument("--step-tokens", type=int, default=4096, help="most tokens of a step (default: %(default)s)")
    parser.add_argument("--one-engine", action="store_true", help="compare with K = 0 of the engine with the head")
    parser.add_argument("--output", type=Path, help="JSON lines of engines are appended to this file")
    options = parser.parse_args()
    good = "ops" not in options.parts or alone(check_ops, options.model, options.device)
    if "drafts" in options.parts:
        alone(time_drafts, options.model, options.device)
    if "engine" in options.parts:
        forced, shape = tuple(options.acceptance), (options.isl, options.osl, options.rounds)
        engines = options.step_tokens, options.one_engine
        job = Job(options.model, options.device, options.k, "", forced, options.concurrency, *shape, *engines)
        run_engines(job, options.output)
    return int(not good)


def parts(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if not set(found) <= {*PARTS}:
        raise argparse.ArgumentTypeError(f"some of {','.join(PARTS)}")
    return found


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def drafts(text: str) -> tuple[int | None, ...]:
    return tuple(None if part == "c" else int(part) for part in text.split(","))


def rates(text: str) -> Rates:
    """Falling, one for each draft."""
    found = tuple(float(part) / 100 for part in text.split(","))
    falling = [1.0, *found]
    if len(found) != MAX_DRAFTS or falling != sorted(falling, reverse=True) or found[-1] <= 0:
        raise argparse.ArgumentTypeError(f"{MAX_DRAFTS} percentages, each above 0 and at most the one before")
    return found


if __name__ == "__main__":
    sys.exit(main())
