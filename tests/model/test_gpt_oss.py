"""The model against transformers on checkpoints in the published format, and incremental against whole."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oscine.checkpoint.opened import open_model
from oscine.model.config import ModelConfig
from oscine.model.gpt_oss import GptOss
from oscine.settings.config import ModelOptions
from tests.model.saved import save
from tests.model.tiny import Sequence, Stepper, logits_of, model, random_tokens, relative_error, tensors, whole
from tests.ops.bound import reference_ops
from tests.tiny import SMALL, WIDE_GROUP

CONFIGS = {"small": SMALL, "wide_group": WIDE_GROUP}
MODELS: dict[ModelConfig, GptOss] = {config: model(config, tensors(config)) for config in CONFIGS.values()}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[GptOss, Any]:
    """Our model and transformers', both read from the same folder."""
    folder = tmp_path_factory.mktemp(request.param)
    config = CONFIGS[request.param]
    save(folder, config, tensors(config), max_shard_bytes=200_000)
    opened = open_model(ModelOptions(model=str(folder)))
    return GptOss(opened.config, opened.load(), reference_ops()), transformers_model(folder)


def transformers_model(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import GptOssForCausalLM, Mxfp4Config

        return GptOssForCausalLM.from_pretrained(
            folder, attn_implementation="eager", quantization_config=Mxfp4Config(dequantize=True)
        ).float()


def transformers_logits(oracle: Any, tokens: Tensor, offset: int) -> Tensor:
    positions = torch.arange(offset, offset + len(tokens))
    with torch.inference_mode():
        logits: Tensor = oracle(tokens[None], position_ids=positions[None], use_cache=False).logits[0]
    return logits


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "offset"), [(1, 0), (7, 0), (300, 0), (300, 4000), (200, 7990)], ids=lambda value: str(value)
)
def test_logits_equal_those_of_transformers(pair: tuple[GptOss, Any], count: int, offset: int) -> None:
    ours, oracle = pair
    tokens = random_tokens(ours.config, count)
    assert relative_error(whole(ours, tokens, offset), transformers_logits(oracle, tokens, offset)) < 1e-5


@pytest.mark.long
def test_residual_streams_equal_those_of_transformers(pair: tuple[GptOss, Any]) -> None:
    ours, oracle = pair
    tokens, last, norm_H = random_tokens(ours.config, 9), ours.config.num_hidden_layers, ours.weights.norm_H
    stepper = Stepper(ours)
    sequence = Sequence(tokens, 0, pages=[stepper.free.pop()])
    batch = replace(stepper.batch(((sequence, 9),)), logits_rows_N=torch.tensor([3, 8]))
    x_NH, streams = ours.hidden_and_aux(batch, stepper.kv, (1, 2, last))
    with torch.inference_mode():
        expected = oracle(tokens[None], use_cache=False, output_hidden_states=True).hidden_states
    normed_TH = ours.ops.rms_norm(streams[last], norm_H, ours.config.rms_norm_eps, None)[0]  # as transformers has it
    for found, wanted in ((streams[1], 1), (streams[2], 2), (normed_TH, last)):
        assert relative_error(found, expected[wanted][0]) < 1e-5
    assert relative_error(x_NH, expected[last][0][[3, 8]]) < 1e-5


def test_a_short_model_returns_a_stream_for_each_layer_of_the_whole_one() -> None:
    ours = MODELS[SMALL]
    last, tokens = SMALL.num_hidden_layers, random_tokens(SMALL, 5)
    assert last > 2
    few = ours.of_layers((0, 1))
    stepper = Stepper(few)
    sequence = Sequence(tokens, 0, pages=[stepper.free.pop()])
    _, streams = few.hidden_and_aux(stepper.batch(((sequence, 5),)), stepper.kv, (0, 1, last - 1, last))
    assert list(streams) == [0, 1, last - 1, last]
    assert torch.equal(streams[last - 1], streams[1])
    assert not torch.equal(streams[last], streams[1])
    assert not torch.equal(streams[0], streams[1])


@pytest.mark.long
def test_a_context_beyond_4096_equals_transformers(tmp_path: Path) -> None:
    """A context of 4,100 tokens, a chunk and three single tokens. Few heads, because the oracle is slow."""
    config = replace(WIDE_GROUP, num_attention_heads=2, num_hidden_layers=2, layer_types=WIDE_GROUP.layer_types[1:])
    made, tokens = tensors(config), random_tokens(config, 4200)
    save(tmp_path, config, made)
    stepper, sequence = Stepper(model(config, made), 66), Sequence(tokens, 0)
    parts = [stepper.step((sequence, count))[0] for count in (2048, 2052, 97, 1, 1, 1)]
    expected = transformers_logits(transformers_model(tmp_path), tokens, 0)
    assert relative_error(torch.cat(parts), expected) < 1e-5


@pytest.mark.long
@given(st.data())
@settings(max_examples=8)
def test_chunks_and_decodes_in_any_mixture_equal_the_whole(data: st.DataObject) -> None:
    config = data.draw(st.sampled_from([SMALL, WIDE_GROUP]))
    ours = MODELS[config]
    sequences = [
        Sequence(random_tokens(config, data.draw(st.integers(1, 260)), seed), offset=0)
        for seed in range(data.draw(st.integers(1, 4)))
    ]
    stepper, logits = Stepper(ours), [torch.empty(0, config.vocab_size) for _ in sequences]
    while pending := [i for i, s in enumerate(sequences) if s.computed < len(s.tokens)]:
        work = []
        for i in pending:
            left = len(sequences[i].tokens) - sequences[i].computed
            work.append((sequences[i], data.draw(st.integers(1, left) | st.just(min(left, 90)))))
        for i, part in zip(pending, stepper.step(*work), strict=True):
            logits[i] = torch.cat((logits[i], part))
    for sequence, got in zip(sequences, logits, strict=True):
        assert relative_error(got, whole(ours, sequence.tokens)) < 1e-5


def test_bfloat16_stays_near_float32() -> None:
    """By KL divergence: rounding moves single logits more than any threshold on them would allow."""
    made, tokens = tensors(SMALL), random_tokens(SMALL, 200)
    exact = whole(MODELS[SMALL], tokens).log_softmax(-1)
    rounded = whole(model(SMALL, made, torch.bfloat16), tokens)
    assert rounded.dtype == torch.float32
    divergence = torch.nn.functional.kl_div(rounded.log_softmax(-1), exact, log_target=True, reduction="batchmean")
    assert 0 < divergence < 1e-2


def test_only_the_wanted_rows_get_logits() -> None:
    ours, tokens = MODELS[SMALL], random_tokens(SMALL, 20)
    stepper, sequence = Stepper(ours), Sequence(tokens, 0)
    sequence.pages.append(0)
    batch = stepper.batch(((sequence, 20),))
    everything = logits_of(ours, replace(batch, logits_rows_N=None), stepper.kv)
    assert torch.equal(logits_of(ours, replace(batch, logits_rows_N=torch.arange(20)), stepper.kv), everything)
    some = logits_of(ours, replace(batch, logits_rows_N=torch.tensor([19, 3])), stepper.kv)
    torch.testing.assert_close(some, everything[[19, 3]])
    none = logits_of(ours, replace(batch, logits_rows_N=torch.empty(0, dtype=torch.int64)), stepper.kv)
    assert none.shape == (0, SMALL.vocab_size)


def test_models_on_the_same_weights_share_the_table_of_rope() -> None:
    whole_model = MODELS[SMALL]
    assert whole_model.of_layers([1]).cos_sin is whole_model.cos_sin
    assert whole_model.with_ops(whole_model.ops).cos_sin is whole_model.cos_sin
