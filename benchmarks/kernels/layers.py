"""All layers of a decode step in a CUDA graph, experts fixed: `python -m benchmarks.kernels.layers [--tokens 1 8 64]`.

With --ranks, of one of several ranks without the others: its kernels, and no messages.

For changes of some microseconds per layer. Different rounding selects different experts, and one expert more costs 3
us. So the routing of each layer is drawn once, and the router's own is computed and dropped. Each chooser is also
timed, from the last activations to tokens.
"""

import argparse
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.inputs import sampling_batch
from benchmarks.kernels.routings import draw
from oscine.checkpoint.hub import PUBLISHED
from oscine.extensions.bench.step_inputs import PAGE, StepLoad, make_batch, random_pages
from oscine.extensions.bench.timer import time_call
from oscine.model.gpt_oss import GptOss
from oscine.model.random_weights import RandomTensors
from oscine.model.tensors import Shard
from oscine.model.weights import load_weights
from oscine.ops.interface import Batch, Chooser, KVCache, Ops, Routing
from oscine.ops.platforms.table import choose, resolve
from oscine.ops.target import Target

DEVICE = torch.device("cuda")
CHOOSERS = ("reference", "screened")


def with_fixed_experts(ops: Ops, num_layers: int, num_experts: int, num_tokens: int, per_token: int) -> Ops:
    """Steps must be whole: the n-th call belongs to layer n modulo num_layers."""
    torch.manual_seed(num_tokens)
    routings = draw(num_layers, num_tokens, num_experts, per_token, DEVICE)
    logits = [left_to_experts(routing, num_experts) for routing in routings] if num_tokens == 1 else []
    calls = iter(range(1 << 30))

    def norm_route(*inputs: object) -> tuple[Tensor, Tensor, Routing]:
        x_TH, residual_TH, routing = ops.norm_route(*inputs)  # type: ignore[arg-type]
        layer = next(calls) % num_layers
        fixed = routings[layer]._replace(prepared=routing.prepared)
        return x_TH, residual_TH, fixed if routing.logits_TE is None else fixed._replace(logits_TE=logits[layer])

    return replace(ops, norm_route=norm_route)


def left_to_experts(routing: Routing, num_experts: int) -> Tensor:
    """The logits [1, E] whose choice is this routing."""
    logits_TE = torch.full((1, num_experts), -100.0, device=routing.weights_TK.device)
    return logits_TE.scatter_(1, routing.expert_ids_TK.long(), routing.weights_TK.log())


def kv_cache(model: GptOss, batch: Batch) -> KVCache:
    return tuple(map(random_pages, model.config.kv_groups(PAGE, "bfloat16"), batch.groups))


def report(model: GptOss, num_tokens: int, context: int, choosers: dict[str, tuple[Chooser, Any]]) -> None:
    config = model.config
    batch = replace(make_batch(config, StepLoad(num_tokens, 1, context), DEVICE), logits_rows_N=None)
    layers, experts = config.num_hidden_layers, config.experts[0]
    ops = with_fixed_experts(model.ops, layers, experts, num_tokens, config.num_experts_per_tok)
    fixed, kv = GptOss(config, model.weights, ops), kv_cache(model, batch)
    step = time_call(lambda _: fixed.hidden(batch, kv), DEVICE, 1).seconds
    print(f"{num_tokens:5} tokens  {step * 1e6 / layers:8.2f} us a layer", end="", flush=True)
    x_NH = fixed.hidden(batch, kv)
    greedy = sampling_batch(num_tokens, DEVICE, temperature_N=torch.zeros(num_tokens, device=DEVICE), greedy=True)
    head_VH = model.weights.head_VH
    for name, (chooser, prepared) in choosers.items():
        choice = time_call(lambda _: chooser.choose(x_NH, head_VH, prepared, greedy), DEVICE, 4).seconds  # noqa: B023
        print(f"  {name} choice {choice * 1e6:7.1f} us, step {(step + choice) * 1e3:6.3f} ms", end="", flush=True)
    print(flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", choices=sorted(PUBLISHED), default="120b", help="model whose shapes are used (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=int, default=1, help="of which one is timed, alone (default: %(default)s)")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 64],
        help="numbers of tokens to measure (default: %(default)s)",
    )
    parser.add_argument(
        "--context", type=int, default=1152, help="tokens of context per sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="OP=BACKEND",
        help="backend of an op, in place of its default one; the option may be repeated",
    )
    options = parser.parse_args()
    config, backends = PUBLISHED[options.model](), dict(one.split("=") for one in options.backend)
    target = Target.of(DEVICE)
    ops = resolve(target, choose("hopper", backends))
    shard = Shard.of_everything(0, options.ranks)
    weights = load_weights(config, RandomTensors(config, 0, DEVICE), DEVICE, torch.bfloat16, ops=ops, shard=shard)
    config = shard.config(config)
    choosers = {name: resolve(target, choose("hopper", backends | {"chooser": name})).chooser for name in CHOOSERS}
    prepared = {name: (chooser, chooser.prepare(weights.head_VH)) for name, chooser in choosers.items()}
    for num_tokens in options.tokens:
        report(GptOss(config, weights, ops), num_tokens, options.context, prepared)


if __name__ == "__main__":
    main()
