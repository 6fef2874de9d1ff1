"""The whole model on a GPU, at the published widths and few layers, with random weights.

Float32 torch is the oracle. The error of the plain torch ops in bfloat16 is the yardstick; kernels may have twice that
error.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from oscine.model.config import ModelConfig, gpt_oss_20b, gpt_oss_120b
from oscine.model.gpt_oss import GptOss
from oscine.model.random_weights import RandomTensors
from oscine.model.weights import load_weights
from oscine.ops.interface import Ops
from oscine.ops.table import choose, platform, resolve
from oscine.ops.target import Target
from tests.model.tiny import PAGE, Sequence, Stepper, random_tokens
from tests.ops.bound import reference_ops

pytestmark = pytest.mark.gpu

# Steps of (sequence, tokens): single tokens first, chunks that end inside pages, contexts beyond the window and past
# 4,096 positions, where the rotary embedding leaves its original range.
STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
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


SHAPES = [
    Shape("120b, 2 layers", gpt_oss_120b(), 2),
    Shape("20b, 4 layers", gpt_oss_20b(), 4),
]


def build(config: ModelConfig, dtype: torch.dtype, ops: Ops) -> GptOss:
    device = torch.device("cuda")
    source = RandomTensors(config, 0, device)
    return GptOss(config, load_weights(config, source, device, dtype, ops=ops), ops)


def run(model: GptOss) -> list[Tensor]:
    """Logits of every token of every step, float32, on the CPU."""
    stepper = Stepper(model, num_pages=sum(-(-n // PAGE) for n in LENGTHS))
    sequences = [Sequence(random_tokens(model.config, n, seed=i), 0) for i, n in enumerate(LENGTHS)]
    out = []
    for step in STEPS:
        logits = stepper.step(*((sequences[i], count) for i, count in step))
        out.append(torch.cat([rows[-64:].cpu() for rows in logits]))
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_kernels_cost_at_most_twice_what_bfloat16_costs(shape: Shape) -> None:
    layers, target = shape.num_layers, Target.of(torch.device("cuda"))
    config = replace(shape.config, num_hidden_layers=layers, layer_types=shape.config.layer_types[:layers])
    truth = run(build(config, torch.float32, reference_ops()))
    plain = run(build(config, torch.bfloat16, reference_ops()))
    fast = run(build(config, torch.bfloat16, resolve(target, choose(platform(target)))))
    for step, (expected, by_torch, by_kernels) in enumerate(zip(truth, plain, fast, strict=True)):
        allowed = 2 * relative_error(by_torch, expected)
        error = relative_error(by_kernels, expected)
        print(f"{shape.name}, step {step}: relative error {error:.2e}, allowed {allowed:.2e}")
        assert error <= allowed


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())
