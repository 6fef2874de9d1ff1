"""Variants of decode kernels against each other, in whole layers: `python -m benchmarks.kernels.candidates`.

For each number of tokens: the step as it is, then each variant alone, then the best of each group together. All graphs
are captured first and replayed in turns, so that a clock that falls is the same for all. Experts are fixed, as in
layers.py. A variant's results are compared with those of the step as it is: experts also with the reference in
float32, and the router's choice with the router's own.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.inputs import random_experts, sampling_batch
from benchmarks.kernels.layers import DEVICE, kv_cache, with_fixed_experts
from benchmarks.kernels.routings import draw_for
from oscine.checkpoint.hub import PUBLISHED
from oscine.extensions.bench.step_inputs import StepLoad, make_batch
from oscine.extensions.bench.timer import capture, seconds_on_gpu
from oscine.model.gpt_oss import GptOss
from oscine.model.random_weights import RandomTensors
from oscine.model.weights import LayerWeights, load_weights
from oscine.ops.attention import hopper as attention
from oscine.ops.choose import hopper as screened
from oscine.ops.choose import hopper_gemm as screen_gemm
from oscine.ops.compile_together import Compilers
from oscine.ops.interface import Batch, KVCache, Ops
from oscine.ops.linear import hopper as linear
from oscine.ops.linear.hopper_bf12 import dense_of
from oscine.ops.linear.hopper_stream import CHUNK, CHUNK_BYTES, Tile, tile_for
from oscine.ops.moe import hopper as moe
from oscine.ops.moe import reference
from oscine.ops.moe.hopper import Tiling, large
from oscine.ops.norm import hopper as norm_of_hopper
from oscine.ops.norm import triton as norm
from oscine.ops.platforms.table import choose, resolve
from oscine.ops.qkv import hopper as qkv
from oscine.ops.target import Target

ROUNDS = 12
SECONDS = 0.03  # of replays in a round, of each variant
RINGS = ((3, 0), (3, 3), (4, 0), (4, 2), (4, 4), (5, 0), (6, 3))  # stages of projections, and how many are early
WORTH = 0.002  # of a step: a smaller gain is noise
FEW = Tiling(4, planes=2, splits=3)
THIN = Tiling(4, planes=2, consumers=1, programs=4)


@dataclass(frozen=True)
class Variant:
    """Attributes of modules that are different, and what else is."""

    group: str  # of which the best one is taken
    name: str
    changes: tuple[tuple[Any, str, Any], ...] = ()
    tiling: Tiling | None = None
    dense: bool = False  # projections in bfloat16


def experts(name: str, tiling: Tiling, changes: tuple[tuple[Any, str, Any], ...] = ()) -> Variant:
    return Variant("experts", name, changes, tiling)


def projections(tokens: int) -> Iterator[Variant]:
    """Tiles of the projections in 12 bits."""
    yield Variant("", "bfloat16", dense=True)
    tables = ("qkv", qkv, "BF12_TILES", 2880, (1, 2, 4)), ("out_proj", linear, "OUT_PROJ_BF12_TILES", 4096, (4, 8))
    for group, module, name, columns, choices in tables:
        now = tile_for(tokens, getattr(module, name))
        assert now is not None
        for parts, (stages, early) in itertools.product(choices, RINGS):
            few = max(now.max_tokens, 8 // parts) if group == "qkv" else now.max_tokens
            tile = replace(now, max_tokens=few, parts=parts, stages=stages, early=early)
            if tile != now and suits(tile, columns, few * (parts if group == "qkv" else 1)):
                told = f"{group}: {parts} parts, {stages} stages, {early} early"
                yield Variant(group, told, ((module, name, (tile,)),))


def suits(tile: Tile, columns: int, num_tokens: int) -> bool:
    """Whether the shared memory suffices, and no stage is unused; num_tokens: columns of a product."""
    used = tile.stages * tile.chunks * (6144 + CHUNK_BYTES * num_tokens) + 64 * num_tokens * 4
    needed = -(-columns // tile.parts // (CHUNK * tile.chunks))
    most_parts = 1 if num_tokens > 32 else 2
    enough = num_tokens <= 64 and used <= 200_000 and tile.stages <= needed
    return enough and (columns != 2880 or tile.parts >= (4 if num_tokens <= 8 else most_parts))


def router(name: str, rows: int, warps: int, registers: int) -> Variant:
    options = {"num_warps": warps, "maxnreg": registers}
    return Variant("router", name, ((norm, "FUSED_ROWS", rows), (norm, "ALL_LOADS_FIRST", options)))


def one_token() -> Iterator[Variant]:
    yield Variant("choice", "the router chooses", ((norm_of_hopper, "can_choose", lambda *_: False),))
    for splits, stages, programs in ((1, 4, 4), (2, 4, 4), (2, 8, 3), (3, 8, 3), (4, 8, 3)):
        tiling = replace(THIN, splits=splits, stages=stages, programs=programs)
        yield experts(f"one warpgroup, {splits} splits, {stages} stages, {programs} programs", tiling)
    yield experts("three warpgroups", FEW)
    yield Variant("attention", "Gluon", ((attention, "FEWEST_DECODES", 1),))
    yield Variant("attention", "Gluon, 18 splits", ((attention, "FEWEST_DECODES", 1), (attention, "PROGRAMS", 144)))
    yield router("router: 8 rows", 8, 32, 64)
    yield router("router: 2 rows, 16 warps", 2, 16, 64)


def variants(tokens: int, num_experts: int, *, only_projections: bool) -> list[Variant]:
    chosen = moe.plan(tokens, 4, num_experts, 2880)
    found = [Variant("", "now")]
    if only_projections:
        return [*found, *projections(tokens)]
    if tokens == 1:
        return [*found, *one_token()]
    found.append(experts("static" if chosen.dynamic else "dynamic", replace(chosen, dynamic=not chosen.dynamic)))
    if chosen.planes and tokens > 4:
        found += [experts(f"{n} splits", replace(chosen, splits=n)) for n in (1, 2, 3) if n != chosen.splits]
        found.append(experts("three warpgroups", replace(chosen, consumers=3, programs=2)))
        found.append(experts("one warpgroup", replace(chosen, consumers=1, programs=4)))
    if chosen.tokens == 64:
        found.append(experts("128 columns", replace(large(128, units=1, stages=8), dynamic=chosen.dynamic)))
    return found


@contextmanager
def applied(changed: Sequence[Variant]) -> Iterator[None]:
    changes = [change for variant in changed for change in variant.changes]
    changes += [
        (moe, "plan", lambda *_, tiling=variant.tiling: tiling) for variant in changed if variant.tiling is not None
    ]
    old = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in reversed(old):
            setattr(module, name, value)


class Point:
    """A number of tokens."""

    def __init__(self, model: GptOss, num_tokens: int, context: int, *, only_projections: bool) -> None:
        config = model.config
        self.variants = variants(num_tokens, config.experts[0], only_projections=only_projections)
        self.model, self.num_tokens = model, num_tokens
        self.batch: Batch = replace(make_batch(config, StepLoad(num_tokens, 1, context), DEVICE), logits_rows_N=None)
        self.kv: KVCache = kv_cache(model, self.batch)
        self._captured: list[GptOss] = []  # graphs read their routings

    def of_fixed_experts(self, *, dense: bool) -> GptOss:
        config, weights = self.model.config, self.model.weights
        if dense:
            weights = replace(weights, layers=[in_bfloat16(layer) for layer in weights.layers])
        ops: Ops = with_fixed_experts(
            self.model.ops, config.num_hidden_layers, config.experts[0], self.num_tokens, config.num_experts_per_tok
        )
        return GptOss(config, weights, ops)

    def step(self, changed: Sequence[Variant]) -> Tensor:
        with applied(changed):
            return self.of_fixed_experts(dense=any(v.dense for v in changed)).hidden(self.batch, self.kv)

    def graph(self, changed: Sequence[Variant]) -> torch.cuda.CUDAGraph:
        with applied(changed):
            fixed = self.of_fixed_experts(dense=any(v.dense for v in changed))
            self._captured.append(fixed)
            return capture(lambda _: fixed.hidden(self.batch, self.kv), DEVICE, 1)


def in_bfloat16(layer: LayerWeights) -> LayerWeights:
    return replace(layer, qkv_weight_FH=dense_of(layer.qkv_weight_FH), out_weight=dense_of(layer.out_weight))


def measure(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Median seconds of a replay."""
    replays = max(1, int(SECONDS / seconds_on_gpu(next(iter(graphs.values())).replay)))
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():

            def replay(graph: torch.cuda.CUDAGraph = graph) -> None:
                for _ in range(replays):
                    graph.replay()

            times[name].append(seconds_on_gpu(replay) / replays)
    return {name: median(seconds[1:]) for name, seconds in times.items()}


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def error_of_experts(tiling: Tiling, tokens: int) -> float:
    """Against the reference, of eight experts."""
    torch.manual_seed(tokens)
    published = random_experts(8, 2880, 2880, DEVICE, torch.bfloat16, scales=(118, 122))
    x_TH = torch.randn(min(tokens, 64), 2880, device=DEVICE).bfloat16()
    target = Target.of(DEVICE)
    routing = draw_for(target, x_TH, 1, 8, 4)[0]
    if len(x_TH) > 16 and tiling.planes:
        routing = routing._replace(prepared=None)
    found = moe.run(target, x_TH, routing, moe.prepare_experts(target, published), 7.0, tiling).float().sum(1)
    oracle = reference.prepare_experts(target, published)
    return difference(found, reference.moe(x_TH.float(), routing, oracle, 7.0))


def router_is_right(point: Point, variant: Variant) -> bool:
    ops, layer = point.model.ops, point.model.weights.layers[0]
    torch.manual_seed(0)
    x, residual_TH = torch.randn(1, 4, 2880, device=DEVICE), torch.randn(1, 2880, device=DEVICE).bfloat16()
    arguments = x, layer.post_attention_norm_H, 1e-5, residual_TH, layer.router_weight_EH, layer.router_bias_E, 4
    expected = ops.norm_route(*arguments)
    with applied([variant]):
        found = ops.norm_route(*arguments)
    # of one token the choice is left to the experts
    pairs = zip((*found[:2], found[2].logits_TE), (*expected[:2], expected[2].logits_TE), strict=True)
    return all(torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-3) for a, b in pairs)


def compile_all(points: Sequence[Point], compilers: Compilers) -> None:
    """All at once, on all cores."""
    with compilers.compile_together():
        for point in points:
            for variant in point.variants:
                point.step([variant])
        for tiles in HEADS.values():
            choice_by(points[0].model, tiles)(0)
    print(f"compiled after {time.monotonic() - STARTED:.0f} s", flush=True)


def report(point: Point) -> None:
    config = point.model.config
    layers, tokens = config.num_hidden_layers, point.num_tokens
    tried = point.variants
    expected = point.step([]).clone()
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    told: dict[str, str] = {}
    for variant in tried:
        notes = [f"differs by {difference(point.step([variant]), expected):.2%}"]
        if variant.tiling is not None:
            notes.append(f"error of experts {error_of_experts(variant.tiling, tokens):.3%}")
        if variant.group == "router":
            notes.append("same logits" if router_is_right(point, variant) else "WRONG LOGITS")
        graphs[variant.name], told[variant.name] = point.graph([variant]), ", ".join(notes)
    print(f"{tokens} tokens, us per layer", flush=True)
    times = measure(graphs)
    show(times, layers, told)
    best: dict[str, Variant] = {}
    for variant in tried[1:]:
        known = best.get(variant.group)
        if times[variant.name] < (times[known.name] if known else times["now"] * (1 - WORTH)):
            best[variant.group] = variant
    together = [*best.values()]
    if len(together) > 1:
        print(f"  together: {' + '.join(v.name for v in together)}")
        sets = {"together": together} | {f"  without {v.name}": [w for w in together if w != v] for v in together}
        show(measure({"now": graphs["now"]} | {name: point.graph(changed) for name, changed in sets.items()}), layers)
    print(f"after {time.monotonic() - STARTED:.0f} s", flush=True)


def show(times: dict[str, float], layers: int, told: Mapping[str, str] = MappingProxyType({})) -> None:
    for name, seconds in times.items():
        saved = (seconds - times["now"]) * 1e6 / layers
        print(f"  {name:<46} {seconds * 1e6 / layers:8.2f} {saved:+7.2f}  {told.get(name, '')}", flush=True)


FIRST, *OTHERS = screen_gemm.TILES
HEADS = {
    "now": screen_gemm.TILES,
    "4 stages": (replace(FIRST, stages=4), *OTHERS),
    "128 rows": (replace(FIRST, rows=128, chunks=1, stages=5, warps=8), *OTHERS),
}


def choice_by(model: GptOss, tiles: tuple[Tile, ...]) -> Callable[[int], Tensor]:
    """The choice of one token from the last activations on."""
    torch.manual_seed(0)
    x_NH = torch.randn(1, model.config.hidden_size, device=DEVICE).bfloat16()
    greedy = sampling_batch(1, DEVICE, temperature_N=torch.zeros(1, device=DEVICE), greedy=True)

    def call(_: int) -> Tensor:
        with applied([Variant("", "", ((screened, "TILES", tiles),))]):
            return model.choose(x_NH, greedy)

    return call


def report_head(model: GptOss) -> None:
    calls = {name: choice_by(model, tiles) for name, tiles in HEADS.items()}
    same = len({int(call(0)) for call in calls.values()}) == 1
    print(f"choice of one token, us ({'the same tokens' if same else 'OTHER TOKENS'})")
    show(measure({name: capture(call, DEVICE, 4) for name, call in calls.items()}), 4)


STARTED = time.monotonic()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", choices=sorted(PUBLISHED), default="120b", help="model whose shapes are used (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[1, 8, 512],
        help="numbers of tokens to measure (default: %(default)s)",
    )
    parser.add_argument(
        "--context", type=int, default=1152, help="tokens of context per sequence (default: %(default)s)"
    )
    parser.add_argument("--projections", action="store_true", help="only tiles of the projections")
    parser.add_argument("--layers", type=int, help="the first layers only")
    options = parser.parse_args()
    config = PUBLISHED[options.model]()
    if options.layers:
        config = config.of_layers(range(options.layers))
    with closing(Compilers()) as compilers:
        ops = resolve(Target.of(DEVICE), choose("hopper"))
        weights = load_weights(config, RandomTensors(config, 0, DEVICE), DEVICE, torch.bfloat16, ops=ops)
        model = GptOss(config, weights, ops)
        print(f"weights after {time.monotonic() - STARTED:.0f} s", flush=True)
        only = options.projections
        points = [Point(model, tokens, options.context, only_projections=only) for tokens in options.tokens]
        compile_all(points, compilers)
        for point in points:
            report(point)
        if not only:
            report_head(model)


if __name__ == "__main__":
    main()
