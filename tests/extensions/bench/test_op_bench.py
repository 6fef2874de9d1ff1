"""`oscine bench ops` on a CPU: the inputs of ops, the bytes that they must read, and the table."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oscine.cli import main
from oscine.extensions.bench import roofline
from oscine.extensions.bench.ops import OpBench, table
from oscine.extensions.bench.roofline import Ceiling
from oscine.extensions.bench.step_inputs import OpCall, StepLoad, make_batch, random_weights, step_calls
from oscine.ops.platforms.table import TABLE
from tests.ops.bound import reference_ops
from tests.tiny import TINY

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
CONFIG = replace(
    TINY, num_hidden_layers=6, layer_types=TINY.layer_types * 3, sliding_window=40, max_position_embeddings=1024
)


@pytest.mark.parametrize(
    ("tokens", "context", "load"),
    [
        (1, 1024, StepLoad(1, 1, 1024)),
        (1024, 1024, StepLoad(1024, 1, 1024)),
        (8192, 1024, StepLoad(8, 1024, 1024)),
        (8192, 32768, StepLoad(1, 8192, 32768)),
        (5000, 1024, StepLoad(4, 1024, 1024)),
    ],
)
def test_many_tokens_are_prompts(tokens: int, context: int, load: StepLoad) -> None:
    assert StepLoad.of(tokens, context) == load


def calls_of(load: StepLoad) -> dict[str, OpCall]:
    ops = reference_ops()
    weights = random_weights(CONFIG, ops, CPU, torch.float32)
    return {op.name: op for op in step_calls(CONFIG, weights, ops, load)}


LOADS = (StepLoad(1, 1, 1), StepLoad(3, 1, 100), StepLoad(2, 70, 70), StepLoad(1, 30, 200))


@torch.inference_mode()
@pytest.mark.parametrize("load", LOADS, ids=str)
def test_every_op_of_a_step_is_there_and_runs(load: StepLoad) -> None:
    calls = calls_of(load)
    assert {op.backend_of for op in calls.values()} == set(TABLE) - {"prepare_step", "choose_few"}
    assert {name: op.per_step for name, op in calls.items()} == {
        **{"rms_norm": 1, "norm_qkv": 6, "attention full": 3, "attention window-40": 3, "out_proj": 6, "norm_route": 6},
        **{"embed": 1, "moe": 6, "choose": 1, "lm_head": 0, "sample": 0},
    }
    for op in calls.values():
        out = op.call(17)
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                assert tensor.isfinite().all(), op.name


@torch.inference_mode()
def test_skewed_weights_have_popular_experts_and_outliers_in_every_op() -> None:
    config = replace(CONFIG, hidden_size=256, num_local_experts=32, num_experts_per_tok=4)
    weights = random_weights(config, reference_ops(), CPU, torch.float32, is_skewed=True)
    load = StepLoad(300, 1, 20)
    calls = {op.name: op for op in step_calls(config, weights, reference_ops(), load)}
    _, residual_TH, routing = calls["norm_route"].call(0)  # type: ignore[misc]
    popularity_E = torch.bincount(routing.expert_ids_TK.flatten(), minlength=32).sort(descending=True).values
    assert popularity_E[0] > 200
    assert popularity_E[-1] < 20
    assert (popularity_E[4:].sum() > 200).all(), "tokens have experts of their own"
    size_H = residual_TH.square().mean(0).sqrt()
    assert (size_H > 100 * size_H.median()).sum() == 4


def test_an_op_must_read_what_the_roofline_says() -> None:
    """With bytes counted in float32 here: all of a decode step but the keys and values."""
    calls = calls_of(StepLoad(1, 1, 100))
    chosen = CONFIG.num_experts_per_tok * roofline.expert_bytes(CONFIG)
    assert calls["moe"].num_bytes == chosen + 2 * 4 * CONFIG.hidden_size
    weights = sum(
        calls[name].num_bytes * calls[name].per_step for name in ("norm_qkv", "out_proj", "norm_route", "choose")
    )
    assert weights == pytest.approx(2 * roofline.fixed_bytes(CONFIG), rel=0.15)
    keys = sum(calls[f"attention {kind}"].num_bytes * 3 for kind in ("full", "window-40"))
    assert keys == pytest.approx(2 * roofline.kv_bytes(CONFIG, 100), rel=0.1)
    flops = sum(op.flops * op.per_step for op in calls.values())
    assert flops == pytest.approx(roofline.token_flops(CONFIG, 100), rel=1e-6)


def test_a_chunk_reads_its_context_once() -> None:
    calls = calls_of(StepLoad(2, 30, 200))
    token = 2 * CONFIG.num_key_value_heads * CONFIG.head_dim * 4
    queries = 2 * 60 * CONFIG.num_attention_heads * CONFIG.head_dim * 4
    assert calls["attention full"].num_bytes == 2 * 200 * token + queries
    assert calls["attention window-40"].num_bytes == 2 * (30 + 39) * token + queries
    pairs = 4 * CONFIG.num_attention_heads * CONFIG.head_dim
    assert calls["attention full"].flops == 2 * sum(range(171, 201)) * pairs
    assert calls["attention window-40"].flops == 2 * 30 * 40 * pairs


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_a_batch_writes_to_pages_of_its_own(load: StepLoad) -> None:
    batch = make_batch(CONFIG, load, CPU)
    for group in batch.groups:
        pages = group.page_table_SB[group.page_table_SB >= 0]
        assert len(set(pages.tolist())) == len(pages)
        assert len(set(group.slots_T.tolist())) == load.tokens
        assert set((group.slots_T // 64).tolist()) <= set(pages.tolist())
    assert (batch.groups[0].page_table_SB >= 0).all()
    assert batch.num_decodes == (load.sequences if load.query_len == 1 else 0)


def test_shares_add_up_and_the_table_says_so() -> None:
    load = StepLoad(2, 1, 50)
    rows = OpBench(CONFIG, CPU, torch.float32, {}).run(load)
    assert sum(row.step_share for row in rows) == pytest.approx(1)
    row = rows[1]
    slow = Ceiling(row.op.num_bytes / row.time.seconds, 1e30)
    assert row.ceiling_share(slow) == pytest.approx(1)
    lines = list(table(load, rows, slow))
    assert lines[0] == "2 tokens: 2 decodes, context 50"
    assert len(lines) == 2 + len(rows) + 1


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "oscine", "bench", "ops", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


def test_the_command() -> None:
    done = bench("--model", "oscine-nano", "--device", "cpu", "--tokens", "1,3", "--backend", "moe=reference")
    assert done.returncode == 0, done.stderr
    assert "1 tokens: 1 decodes, context 1024" in done.stdout
    assert "3 tokens: 3 decodes, context 1024" in done.stdout


@pytest.mark.usefixtures("waiting_policy")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--backend", "moe"], "OP=NAME"),
        (["--backend", "moe=magic"], "magic"),
        (["--backend", "moe=triton"], "moe=triton needs a GPU"),
        (["--tokens", "1,x"], "--tokens takes numbers like 1,64,8192, not '1,x'"),
        (["--tokens", "0"], "--tokens"),
        (["--context", "0"], "--context"),
        (["--context", "131073"], "above the model's own 131072"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else v,
)
def test_errors_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", "oscine-nano"] if "--model" not in arguments else []
    assert main(["bench", "ops", "--device", "cpu", *model, *arguments]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert said in errors.splitlines()[-1]
