"""Decode steps as recorded C calls give the same tokens as ops that are called one by one, in any mix of steps."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from oscine.model.gpt_oss import GptOss
from oscine.model.weights import load_weights
from oscine.ops.attention import reference
from oscine.ops.interface import Ops
from oscine.ops.native.library import unavailable
from oscine.ops.native.recording import NotRecordable
from oscine.ops.platforms.table import choose, resolve
from oscine.ops.target import Target
from oscine.types import GenerationOutput, GenerationRequest
from tests.tiny import TINY

from .test_cuda import mixed_workload
from .tiny import CPU, LivelyTensors, executor, loop, options, prompt, request, run

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")

KINDS: list[dict[str, object]] = [
    {},
    {"temperature": 0.9},
    {"temperature": 1.1, "top_p": 0.8, "top_k": 20, "logprobs": 2},
    {"presence_penalty": 1.5},
    {"logit_bias": {3: 100.0}, "min_tokens": 3, "stop_token_ids": (5,)},
    {"prompt_logprobs": 2},
]


def native_ops() -> Ops:
    return resolve(Target.of(CPU), choose("native"))


def native_model(ops: Ops) -> GptOss:
    torch.set_num_threads(1)
    return GptOss(TINY, load_weights(TINY, LivelyTensors(TINY, 3, CPU), CPU, torch.float32, ops=ops), ops)


def outputs(
    ops: Ops, *requests: GenerationRequest, record: bool = True, pages: int = 64, most_bytes: int = 1 << 24
) -> dict[str, GenerationOutput]:
    asked = options(max_num_seqs=6)
    runner = executor(native_model(ops), asked, pages, pages)
    if record:
        runner.graphs.record(most_bytes)
        runner.forget_page_zero()
    found = run(loop(runner, asked, runner.memory), *requests)
    return {name: replace(output, queue_s=0.0) for name, output in found.items()}


def tokens(outputs: dict[str, GenerationOutput]) -> dict[str, list[int]]:
    return {name: output.token_ids for name, output in outputs.items()}


def counted(count: Counter[str], name: str, op: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        count[name] += 1
        return op(*args)

    return call


@pytest.mark.parametrize("pages", [64, 10])
def test_recorded_and_unrecorded_steps_give_the_same_greedy_tokens(pages: int) -> None:
    """In a cache that is large enough, and in a small one with preemptions."""
    found = outputs(native_ops(), *mixed_workload(), pages=pages)
    expected = outputs(native_ops(), *mixed_workload(), record=False, pages=pages)
    assert tokens(found) == tokens(expected)


def test_recorded_and_unrecorded_steps_sample_the_same() -> None:
    """Rows of all kinds together; the results are bitwise equal."""
    requests = [request(str(i), prompt(11 + 4 * i, start=i), max_tokens=20, seed=i, **k) for i, k in enumerate(KINDS)]
    assert outputs(native_ops(), *requests) == outputs(native_ops(), *requests, record=False)


def test_each_number_of_sequences_is_recorded_once() -> None:
    """Later steps with this number of sequences call no op."""
    count: Counter[str] = Counter()
    ops = native_ops()
    ops = replace(ops, attention=counted(count, "attention", ops.attention), embed=counted(count, "embed", ops.embed))
    outputs(ops, *(request(str(i), prompt(5, start=i), max_tokens=10 * (i + 1)) for i in range(3)))
    # one step of prompts, steps of 1 token when recording begins, and then of 3, 2 and 1 sequences
    assert count["embed"] <= 2 + 3
    assert count["attention"] == count["embed"] * TINY.num_hidden_layers


@pytest.mark.parametrize("most_bytes", [1, 100_000])
def test_the_memory_of_recorded_steps_is_bounded(most_bytes: int) -> None:
    """With room for no step or for a few steps, other steps run op by op, or are recorded again."""
    requests = [request(str(i), prompt(5 + i, start=i), max_tokens=6 + 5 * i) for i in range(6)]
    count: Counter[str] = Counter()
    ops = native_ops()
    ops = replace(ops, embed=counted(count, "embed", ops.embed))
    found = outputs(ops, *requests, most_bytes=most_bytes)
    assert tokens(found) == tokens(outputs(native_ops(), *requests))
    steps = max(request.sampling.max_tokens for request in requests)
    assert (count["embed"] >= steps) == (most_bytes == 1)


def test_a_step_with_other_arithmetic_is_not_recorded() -> None:
    ops = replace(native_ops(), attention=reference.attention)
    with pytest.raises(NotRecordable, match=r"aten\.\w+"):
        executor(native_model(ops), options(), 64, 64).graphs.record()


def test_recording_imports_no_compiler() -> None:
    script = """
import sys, torch
from oscine.ops.native.recording import Recording
with Recording():
    torch.empty(3)
print([name for name in sys.modules if name.startswith(("torch._dynamo.", "torch._inductor."))])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
