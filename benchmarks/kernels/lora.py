"""Decode steps with LoRA adapters, through the engine: `python -m benchmarks.kernels.lora [--model 20b] [--rank 16]`.

Each engine runs in a process of its own, with random weights. For each number of sequences a line has the time of a
decode step without adapters, and the speed of the other cases as a share of it:

    enabled            adapters are enabled, and no request has one
    1, 8               the requests have one adapter, or eight in turns

`attention` adapters change q, k, v and o; `experts` ones change the experts too. Where the memory does not hold eight
of these, --experts-adapters says how many are made.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from oscine.checkpoint.hub import PUBLISHED
from oscine.model.config import ModelConfig

CONCURRENCY = (1, 8, 64, 256)
ISL = 128
MUST = {"enabled": 0.99, "attention": 0.92, "experts 1": 0.90}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(PUBLISHED), default="20b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--osl", type=int, default=192, help="generated tokens of a pass")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCY)
    parser.add_argument(
        "--experts-adapters", type=int, default=8, help="adapters of experts on the device (default: 8)"
    )
    parser.add_argument("--parts", nargs="+", choices=("attention", "experts"), default=("attention", "experts"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(measure(args)))
        return
    plain = _of_process("none", args)
    for part in args.parts:
        _report(part, plain, _of_process(part, args), args.concurrency)


def _of_process(part: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Seconds of a decode step by case and concurrency."""
    own = [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in ("model", "rank", "osl", "passes")]
    numbers = [f"--experts-adapters={args.experts_adapters}", "--concurrency", *map(str, args.concurrency)]
    command = [sys.executable, "-m", "benchmarks.kernels.lora", "--child", part, *own, *numbers]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _report(
    part: str, plain: dict[str, dict[str, float]], found: dict[str, dict[str, float]], concurrency: Sequence[int]
) -> None:
    print(f"\n{part}: step in ms without adapters; speed as a share of that", flush=True)
    print(f"{'c':>4} {'ms':>8} " + " ".join(f"{case:>10}" for case in found))
    for count in map(str, concurrency):
        step_s = plain["none"][count]
        shares = {case: step_s / times[count] for case, times in found.items()}
        print(f"{count:>4} {step_s * 1e3:8.3f} " + " ".join(f"{share:10.3f}" for share in shares.values()))
    for case, times in found.items():
        must = MUST.get(case, MUST.get(part, MUST.get(f"{part} {case}", 0.0)))
        least = min(plain["none"][str(count)] / times[str(count)] for count in concurrency)
        if must:
            print(f"{case}: least {least:.3f}, must be {must}: {'ok' if least >= must else 'MISSED'}")


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    from oscine.engine.build import build_engine
    from oscine.settings.adapters import AdapterOptions
    from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions

    most = max(args.concurrency)
    count = 0 if args.child == "none" else args.experts_adapters if args.child == "experts" else 8
    with tempfile.TemporaryDirectory() as folder:
        config = PUBLISHED[args.model]()
        paths = [write_adapter(Path(folder, str(i)), config, args.rank, args.child, i) for i in range(count)]
        adapters = AdapterOptions()
        if count:
            modules = tuple(f"{i}={path}" for i, path in enumerate(paths))
            adapters = AdapterOptions(True, modules, max_loras=count, max_lora_rank=args.rank)
        options = EngineOptions(
            model=ModelOptions(random_weights=args.model, device="cuda"),
            cache=CacheOptions(prefix_caching=False),
            scheduler=SchedulerOptions(max_num_seqs=most, max_num_batched_tokens=max(2048, most)),
            adapters=adapters,
        )
        engine = build_engine(options)
    identities = [info.identity for info in engine.info.adapters or ()]
    cases: dict[str, list[str]] = {"none": [""]}
    if identities:
        cases = {"enabled": [""], "1": identities[:1], str(len(identities)): identities}
    found: dict[str, dict[str, float]] = {case: {} for case in cases}
    for concurrency in args.concurrency:
        for case, own in cases.items():
            _pass(engine, concurrency, 8, own)
            steps = []
            for _ in range(args.passes):
                first_s, full_s = (_pass(engine, concurrency, osl, own) for osl in (1, args.osl))
                steps.append((full_s - first_s) / (args.osl - 1))
            found[case][str(concurrency)] = median(steps)
    return found


def _pass(engine: object, concurrency: int, osl: int, identities: Sequence[str]) -> float:
    """Seconds until all requests have their tokens."""
    import random

    from oscine.types import GenerationRequest, SamplingParams

    loop, vocabulary = engine.loop, engine.info.vocab_size  # type: ignore[attr-defined]
    draw = random.Random(concurrency)
    sampling = SamplingParams(max_tokens=osl, temperature=0.0)
    started_s = time.perf_counter()
    for i in range(concurrency):
        prompt = draw.choices(range(vocabulary), k=ISL)
        loop.add(GenerationRequest(str(i), prompt, sampling, adapter=identities[i % len(identities)]))
    while loop.has_work:
        for output in loop.step():
            if output.error is not None:
                raise RuntimeError(output.error)
    return time.perf_counter() - started_s


def write_adapter(folder: Path, config: ModelConfig, rank: int, part: str, seed: int) -> Path:
    """Random factors, as PEFT writes them. `part`: attention, or experts for both."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    tensors = {}

    def put(module: str, out: int, into: int, experts: int = 1) -> None:
        a, b = (experts * rank, into), (out, experts * rank)
        for name, shape, columns in (("A", a, into), ("B", b, rank)):
            factor = torch.randn(shape, generator=generator).mul_(0.1 / columns**0.5).bfloat16()
            tensors[f"base_model.model.{module}.lora_{name}.weight"] = factor

    for layer in range(config.num_hidden_layers):
        attention = f"model.layers.{layer}.self_attn"
        for name, out, into in (
            ("q_proj", queries, hidden),
            ("k_proj", keys, hidden),
            ("v_proj", keys, hidden),
            ("o_proj", hidden, queries),
        ):
            put(f"{attention}.{name}", out, into)
        if part == "experts":
            experts = f"model.layers.{layer}.mlp.experts"
            put(f"{experts}.base_layer", 2 * inner, hidden, config.experts[layer])
            put(experts, hidden, inner, config.experts[layer])
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


if __name__ == "__main__":
    main()
