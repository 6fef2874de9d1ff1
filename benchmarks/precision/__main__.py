"""How far logits are from those of float32, by precision: true widths and random weights, or the embedded model.

    python -m benchmarks.precision                          gpt-oss-120b on a GPU, by the kernels that serve
    python -m benchmarks.precision --device cpu             12 layers of 8 experts, by the reference ops
    python -m benchmarks.precision --device cpu --formats   also formats that no kernel has
    python -m benchmarks.precision --device cpu --model oscine-nano --sequences 8 --prompt 400      trained weights

The truth is float32 with the same MXFP4 values. The yardstick is plain torch in bfloat16: its products, residuals and
keys are bfloat16, and so is each step of SwiGLU.

Random routers have near ties. A rounding that decides one otherwise changes a row far more than a format does. So each
precision runs twice: with its own routing, as a server does, and with the truth's choice of experts imposed, which
leaves the error of the arithmetic alone.

Random weights keep trained magnitudes where it matters here: rows behind a norm are about 1 (largest of 2,880: 3.7),
h is some 1 and heavy-tailed, and each layer adds about 1 to the residual. --outliers adds what random weights lack: 8
channels of the experts' input, and one of each key head, that are 20 times larger.
"""

import argparse
import gc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.precision.emulation import Moe, expand, plain_moe, rounding_moe
from benchmarks.precision.formats import FP8, MXFP8, OTHERS, fp16, unchanged
from benchmarks.precision.runs import Choices, Error, Load, Result, run
from oscine.checkpoint.hub import NANO_FOLDER, PUBLISHED
from oscine.checkpoint.opened import open_model
from oscine.extensions.bench.machine import describe
from oscine.model.config import ModelConfig
from oscine.model.gpt_oss import GptOss
from oscine.model.skewed_weights import random_tensors
from oscine.model.weights import TensorSource, Weights, load_weights
from oscine.ops.interface import Ops
from oscine.ops.platforms.table import choose, platform_of, resolve
from oscine.ops.target import ActivationDtype, Target
from oscine.settings.config import NANO, ModelOptions

OUTLIER, OUTLIERS = 20.0, 8
ON_CPU = {"layers": 12, "experts": 8, "vocabulary": 4096, "sequences": 2, "prompt": 64}
KERNELS: dict[ActivationDtype, tuple[str, str]] = {
    "auto": ("exact path", "FP8 keys and values"),
    "fp8": ("FP8 activations", "both"),
}
ON_GPU = {"sequences": 4, "prompt": 255}


@dataclass(frozen=True, slots=True)
class Precision:
    name: str
    model: GptOss
    fp8_keys: bool = False


class WithOutliers:
    """A source of tensors with the outlier channels of trained models."""

    def __init__(self, source: TensorSource, head_dim: int) -> None:
        self._source = source
        self._head_dim = head_dim

    def get(self, name: str) -> Tensor:
        tensor = self._source.get(name)
        if name.endswith("post_attention_layernorm.weight"):
            tensor[5 :: len(tensor) // OUTLIERS] = OUTLIER
        if name.endswith("k_proj.bias"):
            tensor.view(-1, self._head_dim)[:, 5] = OUTLIER
        return tensor


def emulated(config: ModelConfig, weights: Weights, ops: Ops, moe: Moe) -> GptOss:
    return GptOss(config, weights, replace(ops, moe=moe))


def cast(weights: Weights, dtype: torch.dtype) -> Weights:
    """All dense tensors in another dtype. Experts are as they were."""

    def layer(own: object) -> dict[str, Tensor]:
        tensors = {name: getattr(own, name) for name in own.__slots__ if name != "experts"}  # type: ignore[attr-defined]
        return {name: tensor.to(dtype) for name, tensor in tensors.items()}

    return replace(
        weights,
        embed_VH=weights.embed_VH.to(dtype),
        layers=[replace(own, **layer(own)) for own in weights.layers],
        norm_H=weights.norm_H.to(dtype),
        head_VH=weights.head_VH.to(dtype),
    )


def by_plain_torch(config: ModelConfig, weights: Weights, ops: Ops, formats: bool) -> Iterator[Precision]:
    """The yardstick first. `ops`: the reference ops. `weights`: bfloat16, experts as published or expanded."""
    model = partial(emulated, config, weights, ops)
    yield Precision("plain bfloat16", model(plain_moe))
    exact, fp8 = model(rounding_moe(unchanged, fp16)), model(rounding_moe(*FP8))
    yield Precision("exact path", exact)
    yield Precision("FP8 keys and values", exact, fp8_keys=True)
    yield Precision("FP8 activations", fp8)
    yield Precision("both", fp8, fp8_keys=True)
    yield Precision("MXFP8 activations", model(rounding_moe(*MXFP8)))
    for name, roundings in OTHERS.items() if formats else ():
        yield Precision(name, model(rounding_moe(*roundings)))


class Table:
    """Prints a row per precision as soon as it has run."""

    def __init__(self, truth: Result, load: Load) -> None:
        self._truth, self._load = truth, load
        self._yardstick: tuple[Error, Error] | None = None
        print("| precision | own routing: error | of bfloat16's | median row | other experts ", end="")
        print("| imposed routing: error | of bfloat16's | decode step |\n|---|---|---|---|---|---|---|---|")

    def add(self, precision: Precision) -> None:
        own, imposed = (self._error(precision, choices) for choices in (None, self._truth.choices))
        self._yardstick = self._yardstick or (own, imposed)
        plain_own, plain_imposed = self._yardstick
        cells = (
            precision.name,
            f"{own.prompt:.1%}",
            f"{own.prompt / plain_own.prompt:.2f}",
            f"{own.median / plain_own.median:.2f}",
            f"{own.other_experts:.1%}",
            f"{imposed.prompt:.1%}",
            f"{imposed.prompt / plain_imposed.prompt:.2f}",
            f"{imposed.decode / plain_imposed.decode:.2f}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)

    def _error(self, precision: Precision, imposed: Choices | None) -> Error:
        return Error.of(run(precision.model, self._load, fp8_keys=precision.fp8_keys, imposed=imposed), self._truth)


def measure(config: ModelConfig, source: TensorSource, target: Target, load: Load, formats: bool) -> None:
    device, torch_ops = target.device, resolve(target, choose("cpu"))
    exact = load_weights(config, source, device, torch.float32)
    if device.type == "cpu":
        exact = replace(exact, layers=[replace(own, experts=expand(own.experts)) for own in exact.layers])
    truth = run(emulated(config, exact, torch_ops, rounding_moe(unchanged, unchanged)), load)
    table, rounded = Table(truth, load), cast(exact, torch.bfloat16)
    del exact
    for precision in by_plain_torch(config, rounded, torch_ops, formats):
        table.add(precision)
    if device.type == "cuda":
        del rounded, precision  # the same experts, prepared for kernels, take as much memory again
        add_kernels(table, config, source, target, load)


def add_kernels(table: Table, config: ModelConfig, source: TensorSource, target: Target, load: Load) -> None:
    """What a server computes."""
    from oscine.ops.compile_together import Compilers  # needs Triton

    with closing(Compilers()) as compilers:
        for activations, names in KERNELS.items():
            gc.collect()
            torch.cuda.empty_cache()
            chip = replace(target, activation_dtype=activations)
            ops = resolve(chip, choose(platform_of(target).name), leave_choice=False)  # the choice is compared
            model = GptOss(config, load_weights(config, source, target.device, torch.bfloat16, ops=ops), ops)
            for fp8_keys, name in enumerate(names):
                with compilers.compile_together():
                    run(model, load, fp8_keys=bool(fp8_keys))
                table.add(Precision(f"kernels: {name}", model, fp8_keys=bool(fp8_keys)))
            del model, ops


def of_random_weights(chosen: argparse.Namespace, device: torch.device) -> tuple[ModelConfig, TensorSource, Load]:
    config = PUBLISHED[chosen.model]()
    layers = chosen.layers or config.num_hidden_layers
    config = replace(
        config.of_layers(range(layers)),
        num_local_experts=(chosen.experts or config.experts[0],) * layers,
        vocab_size=chosen.vocabulary or config.vocab_size,
        eos_token_ids=(),
    )
    source: TensorSource = random_tensors(config, 0, device, is_skewed=chosen.skewed)
    if chosen.outliers:
        source = WithOutliers(source, config.head_dim)
    return config, source, Load.of_random_tokens(config, chosen.sequences, chosen.prompt)


def of_nano(chosen: argparse.Namespace) -> tuple[ModelConfig, TensorSource, Load]:
    """Its prompts are the beginnings of held-out texts with hidden facts."""
    from training.evaluate import SEED, SKILLS  # needs packages that random weights do not
    from training.packing import Encoder
    from training.split import Draw

    opened, encoder = open_model(ModelOptions(NANO)), Encoder(NANO_FOLDER)
    make = next(skill.make for skill in SKILLS if skill.name == "recall at 500 tokens")
    prompts = [encoder.prompt(make(Draw(SEED + i, held_out=True))) for i in range(chosen.sequences)]
    length = min(chosen.prompt + 1, *map(len, prompts))
    return opened.config, opened.source, Load(torch.tensor([prompt[:length] for prompt in prompts]))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = (*sorted(PUBLISHED), NANO)
    parser.add_argument("--model", choices=models, default="120b", help="model (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    for name, what in (
        ("layers", "layers of random weights"),
        ("experts", "experts of each such layer"),
        ("vocabulary", "tokens of their vocabulary"),
        ("sequences", "prompts of the load"),
        ("prompt", "tokens of each prompt"),
    ):
        defaults = f"{ON_GPU.get(name, 'as published')} on a GPU, {ON_CPU[name]} on a CPU"
        parser.add_argument(f"--{name}", type=int, help=f"{what} (default: {defaults})")
    parser.add_argument("--outliers", action="store_true", help="random weights with outlier channels")
    parser.add_argument("--skewed", action="store_true", help="random weights as those of oscine serve's NAME:skewed")
    parser.add_argument("--formats", action="store_true", help="measure all emulated formats of activations too")
    found = parser.parse_args()
    for name, value in (ON_CPU if found.device == "cpu" else ON_GPU).items():
        if getattr(found, name) is None:
            setattr(found, name, value)
    return found


def main() -> None:
    chosen = options()
    target = Target.of(torch.device(chosen.device))
    made = of_nano(chosen) if chosen.model == NANO else of_random_weights(chosen, target.device)
    config, source, load = made
    size = f"{config.num_hidden_layers} layers of {config.experts[0]} experts"
    print(f"{chosen.model}, {size}, {load}, {describe(chosen.device, None).gpu}\n")
    measure(config, source, target, load, chosen.formats)


if __name__ == "__main__":
    main()
