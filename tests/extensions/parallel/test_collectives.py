"""Ranks whose GPUs cannot reach each other's memory: NCCL between two GPUs, and its twin gloo on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.kernels.ranks import run_ranks
from oscine.ops.target import Alone
from tests.extensions.parallel.collective_ranks import answer

ROOT = Path(__file__).parents[3]


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are on GPUs here")
def test_two_ranks_on_a_cpu() -> None:
    expected = answer(Alone())
    assert len(set(expected)) > 3
    for found in run_ranks("tests.extensions.parallel.collective_ranks", "on_a_cpu"):
        assert not found["wrong"], "\n".join(found["wrong"])
        assert found["tokens"] == expected
        assert found["access"] == [True, False, False, False]


@pytest.mark.multi_gpu
@pytest.mark.timeout(200)
def test_two_ranks_over_nccl() -> None:
    for wrong in run_ranks("tests.extensions.parallel.collective_ranks", "messages", limit=120):
        assert not wrong, "\n".join(wrong)


@pytest.mark.multi_gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("hidden", ["1", "0"], ids=["without peer access", "with it"])
def test_an_engine_of_two_ranks(hidden: str, tmp_path: Path) -> None:
    """With CUDA graphs, prompts of several steps, and the cache that gets what is left."""
    pytest.importorskip("msgspec", reason="ranks are launched with it")
    command = [sys.executable, "-m", "oscine", "bench", "engine", "--model", "oscine-nano", "--device", "cuda:0,1"]
    command += ["--tensor-parallel-size", "2", "--points", "1:64:32", "32:600:48"]
    env = os.environ | {"OSCINE_NO_PEER_ACCESS": hidden, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert ("go through NCCL" in done.stderr) == (hidden == "1")


@pytest.mark.multi_gpu
@pytest.mark.timeout(200)
def test_engines_share_no_experts_without_peer_access(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "oscine", "bench", "engine", "--model", "oscine-nano", "--device", "cuda:0,1"]
    command += ["--data-parallel-size", "2", "--enable-expert-parallel", "--points", "2:8:8"]
    env = os.environ | {"OSCINE_NO_PEER_ACCESS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 2
    assert "--enable-expert-parallel needs GPUs that can reach each other's memory" in done.stderr.splitlines()[-1]
