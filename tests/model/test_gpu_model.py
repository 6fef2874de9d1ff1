"""The whole model on a GPU, at the published widths and few layers, with random weights.

Float32 torch is the oracle. The error of the plain torch ops in bfloat16 is the yardstick; kernels may have twice that
error.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from oscine.model.config import ModelConfig, gpt_oss_20b, gpt_oss_120b
from oscine.model.gpt_oss import GptOss
from oscine.model.skewed_weights import random_tensors
from oscine.model.tensors import Shard
from oscine.model.weights import HostPlace, load_weights
from oscine.ops.interface import Ops
from oscine.ops.platforms.table import choose, platform_of, resolve
from oscine.ops.target import Target
from tests.model.tiny import PAGE, Sequence, Stepper, random_tokens
from tests.ops.bound import reference_ops

pytestmark = pytest.mark.gpu

# Steps of (sequence, tokens): single tokens first, chunks that end inside pages, contexts beyond the window and past
# 4,096 positions, where the rotary embedding leaves its original range.
Steps = tuple[tuple[tuple[int, int], ...], ...]
STEPS: Steps = (
    ((0, 1), (1, 2500), (2, 129)),
    ((0, 1), (2, 1), (1, 2001), (3, 65)),
    ((0, 1), (1, 1), (2, 1), (3, 1)),
    ((1, 1),),
)
LENGTHS = (8, 4600, 140, 70)


@dataclass(frozen=True)
class Shape:
    name: str
    config: ModelConfig
    num_layers: int
    is_skewed: bool = False


SHAPES = [
    Shape("120b, 2 layers", gpt_oss_120b(), 2),
    Shape("20b, 4 layers", gpt_oss_20b(), 4),
]
SKEWED = Shape("120b:skewed, 2 layers", gpt_oss_120b(), 2, is_skewed=True)


def build(
    config: ModelConfig,
    dtype: torch.dtype,
    ops: Ops,
    shard: Shard | None = None,
    host: HostPlace | None = None,
    *,
    is_skewed: bool = False,
) -> GptOss:
    """A model with the shard's part of a whole model's random weights."""
    device = torch.device("cuda", torch.cuda.current_device())
    source = random_tensors(config, 0, device, is_skewed=is_skewed)
    shard = shard or Shard()
    if host is not None:
        ops = replace(ops, moe=host.beside(ops.moe))
    on_host = host is not None
    weights = load_weights(config, source, device, dtype, ops=ops, shard=shard, on_host=host, embedding_on_host=on_host)
    return GptOss(shard.config(config), weights, ops)


def run(model: GptOss, steps: Steps, begin: Callable[[int], None] = lambda index: None) -> list[Tensor]:
    """Logits of every token of every step, float32, on the CPU. `begin`: called before each step."""
    stepper = Stepper(model, num_pages=sum(-(-n // PAGE) for n in LENGTHS))
    sequences = [Sequence(random_tokens(model.config, n, seed=i), 0) for i, n in enumerate(LENGTHS)]
    out = []
    for index, step in enumerate(steps):
        begin(index)
        logits = stepper.step(*((sequences[i], count) for i, count in step))
        out.append(torch.cat([rows[-64:].cpu() for rows in logits]))
    return out


class Error(NamedTuple):
    of_kernels: float  # relative
    of_bfloat16: float  # of plain torch
    bits: int  # of the kernels' logits, added up
    rows_of_kernels: list[float]  # relative, of each row
    rows_of_bfloat16: list[float]


def errors(
    shape: Shape,
    target: Target,
    shard: Shard | None = None,
    steps: Steps = STEPS,
    begin: Callable[[int], None] = lambda index: None,
    host: HostPlace | None = None,
) -> list[Error]:
    """Of each step. `shard`: the rank's, unless everything is divided."""
    layers, ranks = shape.num_layers, target.communicator
    config = replace(shape.config, num_hidden_layers=layers, layer_types=shape.config.layer_types[:layers])
    made = partial(build, config, is_skewed=shape.is_skewed)
    truth = run(made(torch.float32, reference_ops()), steps)
    plain = run(made(torch.bfloat16, reference_ops()), steps)
    shard = shard or Shard.of_everything(ranks.rank, ranks.num_ranks)
    ops = resolve(target, choose(platform_of(target).name), leave_choice=host is None)
    fast = run(made(torch.bfloat16, ops, shard, host), steps, begin)
    return [
        Error(
            of_kernels=relative_error(logits, exact),
            of_bfloat16=relative_error(rough, exact),
            bits=int(logits.view(torch.int32).sum()),
            rows_of_kernels=row_errors(logits, exact),
            rows_of_bfloat16=row_errors(rough, exact),
        )
        for exact, rough, logits in zip(truth, plain, fast, strict=True)
    ]


def check(shape: Shape, found: list[Error]) -> None:
    for step, error in enumerate(found):
        print(f"{shape.name}, step {step}: {error.of_kernels:.2e}, of bfloat16 {error.of_bfloat16:.2e}")
        assert error.of_kernels <= 2 * error.of_bfloat16


def check_rows(name: str, found: list[Error]) -> None:
    """Where routers have near ties, another rounding gives a few rows other experts and a far larger error."""
    kernels = [error for step in found for error in step.rows_of_kernels]
    plain = [error for step in found for error in step.rows_of_bfloat16]
    usual = median(plain)
    other, of_bfloat16 = (sum(error > 10 * usual for error in errors) for errors in (kernels, plain))
    print(f"{name}: median {median(kernels):.2e}, of bfloat16 {usual:.2e}")
    print(f"rows with other experts: {other}, of bfloat16 {of_bfloat16}, of {len(plain)}")
    assert median(kernels) <= 2 * usual
    assert other <= 2 * of_bfloat16 + len(plain) // 50


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_kernels_cost_at_most_twice_what_bfloat16_costs(shape: Shape) -> None:
    check(shape, errors(shape, Target.of(torch.device("cuda"))))


def test_kernels_cost_at_most_twice_what_bfloat16_costs_with_skewed_weights() -> None:
    check_rows(SKEWED.name, errors(SKEWED, Target.of(torch.device("cuda"))))


@pytest.mark.needs("experts_on_host")
def test_the_error_with_experts_on_the_host() -> None:
    """Half of the layers and the embedding are on the host. The CPU computes single tokens; chunks are streamed."""
    from oscine.extensions.experts_on_host.layers import HostLayers

    target, shape = Target.of(torch.device("cuda")), SHAPES[1]
    host = HostLayers(target, range(2, 4), shape.config.hidden_size, shape.config.num_experts_per_tok)
    check(shape, errors(shape, target, host=host))


def row_errors(got: Tensor, expected: Tensor) -> list[float]:
    errors: list[float] = ((got - expected).norm(dim=1) / expected.norm(dim=1)).tolist()
    return errors


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())
