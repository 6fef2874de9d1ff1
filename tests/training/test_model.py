"""The training model is gpt-oss: its export, loaded by transformers, gives the same logits and the same tokens."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from oscine.chat.tokenizer import Tokenizer
from training.attention import CachedAttention, DocumentAttention
from training.export import export, load
from training.generate import Generator
from training.model import GptOss, Size

if TYPE_CHECKING:  # takes seconds, of every process that collects the tests
    from transformers import GptOssForCausalLM

SIZE = Size(vocab_size=1920, hidden=64, intermediate=32, layers=4, heads=4, kv_heads=2, head_dim=64, window=128)
LENGTH = 150  # beyond the window


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model in the published format, with biases and sinks that matter."""
    folder = tmp_path_factory.mktemp("tiny")
    model = GptOss(SIZE)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
            elif "embed" not in name:
                parameter.normal_(0, 0.15, generator=generator)
    export(model, folder, Tokenizer("oscine/model/nano"))
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> "GptOssForCausalLM":
    from transformers import GptOssForCausalLM, Mxfp4Config

    config = Mxfp4Config(dequantize=True)
    return GptOssForCausalLM.from_pretrained(folder, quantization_config=config, attn_implementation="eager").float()


def tokens(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, SIZE.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.long
def test_logits_equal_those_of_transformers(folder: Path, reference: "GptOssForCausalLM") -> None:
    ids = tokens(1, 2, LENGTH)
    starts = torch.zeros(2, LENGTH, dtype=torch.int32)
    with torch.no_grad():
        logits, _ = load(folder)(ids, torch.arange(LENGTH).expand(2, -1), DocumentAttention(SIZE, starts))
        expected = reference(ids).logits
    error = float((logits - expected).norm() / expected.norm())
    assert error < 1e-5


def test_packed_documents_do_not_see_each_other(folder: Path) -> None:
    model, ids = load(folder), tokens(2, 1, LENGTH)
    starts = torch.zeros(1, LENGTH, dtype=torch.int32)
    starts[:, 40:] = 40
    packed, _ = model(ids, torch.arange(LENGTH)[None] - starts, DocumentAttention(SIZE, starts))
    alone, _ = model(ids[:, 40:], torch.arange(LENGTH - 40)[None], DocumentAttention(SIZE, torch.zeros(1, LENGTH - 40)))
    torch.testing.assert_close(packed[:, 40:], alone, rtol=1e-4, atol=1e-4)


def test_cached_steps_equal_one_pass(folder: Path) -> None:
    model, ids = load(folder), tokens(3, 1, LENGTH)
    whole, _ = model(ids, torch.arange(LENGTH)[None], DocumentAttention(SIZE, torch.zeros(1, LENGTH)))
    attend = CachedAttention(SIZE, 1, LENGTH, torch.device("cpu"), torch.float32)
    parts = []
    for positions in (torch.arange(0, 100)[None], torch.arange(100, 149)[None], torch.arange(149, 150)[None]):
        attend.advance(positions)
        parts.append(model(ids[:, positions[0]], positions, attend)[0])
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_batched_generation_equals_transformers(folder: Path, reference: "GptOssForCausalLM") -> None:
    prompts = [tokens(i, 7 + 9 * i).tolist() for i in range(3)]
    generated = Generator(load(folder), stop_ids=(3,))(prompts, 8)
    for prompt, output in zip(prompts, generated, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=3, pad_token_id=0
        )
        assert output == expected[0, len(prompt) :].tolist()
