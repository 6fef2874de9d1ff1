"""EAGLE-3 heads: every published format against a reference in plain torch, drafting on pages dealt in disorder."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.inputs import sampling_batch
from oscine.checkpoint.hub import NANO_FOLDER
from oscine.extensions.speculation.eagle.checkpoint import open_head
from oscine.extensions.speculation.eagle.head import Drafted, EagleHead
from oscine.extensions.speculation.eagle.weights import MAX_DRAFTED, frequent
from oscine.extensions.speculation.ops import reference as reference_draft
from oscine.extensions.speculation.ops.interface import DraftOps, SliceOfHead
from oscine.extensions.speculation.ops.table import resolve_draft
from oscine.model.config import ModelConfig
from oscine.model.gpt_oss import GptOss
from oscine.model.weights import load_weights
from oscine.ops.interface import Batch, PageGroup
from oscine.ops.native.library import unavailable
from oscine.ops.native.recording import Recording
from oscine.ops.platforms.table import choose, named, resolve
from oscine.ops.sample.noise import gumbel
from tests.model.eagle_heads import FORMATS, Format, ReferenceHead, config_of, random_streams, tensors_of, write
from tests.model.tiny import CPU, DictSource, tensors
from tests.ops.bound import CPU_TARGET
from tests.ops.compile_ahead import run_interpreted
from tests.tiny import SMALL

PAGE = 16
NANO_HEAD_BYTES = 3_000_000
LENGTHS = (37, 20)  # two sequences: over page boundaries, and beyond the window of the head that has one
PLATFORMS = [
    "cpu",
    pytest.param("native", marks=pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")),
]
GREEDY = sampling_batch(len(LENGTHS), CPU, greedy=True)
TARGET = tensors(SMALL)


def loaded(folder: Path, platform: str, draft: DraftOps | None = None) -> EagleHead:
    target = replace(CPU_TARGET, cpu_weights="float32")
    ops = resolve(target, choose(platform))
    model = GptOss(SMALL, load_weights(SMALL, DictSource(TARGET), CPU, torch.float32, ops=ops), ops)
    opened, output = open_head(folder, SMALL), lambda: TARGET["lm_head.weight"]
    draft = draft or resolve_draft(target, named(platform))
    return EagleHead.load(opened.config, opened, opened.names, model, output, draft, torch.float32)


class Pages:
    """Pages of the head's layer, filled with NaN, and the sequences' tables."""

    def __init__(self) -> None:
        self.kv = torch.full((16, 2, SMALL.num_key_value_heads, PAGE, SMALL.head_dim), torch.nan)
        self.table = torch.randperm(16, generator=torch.Generator().manual_seed(3)).view(2, 8).int()

    def slots(self, sequence: int, positions: Tensor) -> Tensor:
        return self.table[sequence].long()[positions // PAGE] * PAGE + positions % PAGE

    def batch(self, first: list[int], counts: list[int]) -> Batch:
        """The tokens of both sequences from these positions on."""
        positions = [torch.arange(start, start + count) for start, count in zip(first, counts, strict=True)]
        slots = torch.cat([self.slots(s, p) for s, p in enumerate(positions)])
        together = torch.cat(positions)
        return Batch(
            token_ids_T=together,
            positions_T=together,
            query_starts_S1=torch.tensor([0, *counts]).cumsum(0).int(),
            context_lens_S=(torch.tensor(first) + torch.tensor(counts)).int(),
            groups=(PageGroup(self.table, slots),),
            logits_rows_N=None,
            num_decodes=len(counts) if max(counts) == 1 else 0,
        )


@pytest.mark.long
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_drafts_equal_the_reference(format: Format, platform: str, tmp_path: Path) -> None:
    made = tensors_of(format, SMALL)
    head, pages = loaded(write(tmp_path, config_of(format, SMALL), made), platform), Pages()
    reference = ReferenceHead(format, made, TARGET)
    assert head.aux_layers == format.aux_layers
    streams = [random_streams(SMALL, length, format.aux_layers) for length in LENGTHS]
    next_ids = [torch.randint(0, 200, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    joined = {tap: torch.cat([own[tap] for own in streams]) for tap in format.aux_layers}
    features_TH, ids_T = head.features(joined), torch.cat(next_ids)

    batch = pages.batch([0, 0], [*LENGTHS])
    drafted = head.step(features_TH, ids_T, batch, batch.groups[0], pages.kv)
    expected = [reference.features(own) for own in streams]
    hidden = torch.cat([reference.hidden(own, ids) for own, ids in zip(expected, next_ids, strict=True)])
    if not format.norm_output:
        torch.testing.assert_close(drafted.feature_TH.double(), hidden, rtol=1e-4, atol=1e-4)
    best = reference.logits(hidden).argmax(-1)
    assert torch.equal(head.choose(drafted.normed_TH, sampling_batch(len(best), CPU, greedy=True)), best)

    pages.kv.fill_(torch.nan)
    slots_T = batch.groups[0].slots_T
    head.fill(features_TH, ids_T, batch.positions_T, slots_T, pages.kv)
    last = torch.tensor(LENGTHS).cumsum(0) - 1
    found = drafts_after(head, pages, features_TH[last], ids_T[last], [n - 1 for n in LENGTHS])
    of_each = [reference.drafts(own, ids, 3)[0] for own, ids in zip(expected, next_ids, strict=True)]
    assert found == of_each


def drafts_after(head: EagleHead, pages: Pages, features: Tensor, ids: Tensor, positions: list[int]) -> list[list[int]]:
    """Three greedy drafts for each sequence."""
    found = []
    for draft in range(3):
        batch = pages.batch([p + draft for p in positions], [1] * len(positions))
        features, normed = head.step(features, ids, batch, batch.groups[0], pages.kv)
        ids = head.choose(normed, GREEDY)
        found.append(ids)
    return torch.stack(found, 1).tolist()


def drafts_on_kernels() -> None:
    """Each format with the kernels of GPUs, against the reference ops on the weights that the 4 bits stand for."""
    from oscine.extensions.speculation.ops.weights import pack, unpack

    exact = resolve_draft(CPU_TARGET, named("cpu"))
    exact = replace(exact, prepare=lambda weight, dtype: unpack(pack(weight)).to(dtype))
    for format in (FORMATS[0], FORMATS[4]):
        made = tensors_of(format, SMALL)
        with TemporaryDirectory() as folder:
            path = write(Path(folder), config_of(format, SMALL), made)
            heads = [loaded(path, "cpu", draft) for draft in (resolve_draft(CPU_TARGET, named("cuda")), exact)]
        found = []
        for head in heads:
            pages = Pages()
            features = head.features(random_streams(SMALL, 4, format.aux_layers))
            head.fill(features, torch.tensor([7, 8, 9, 10]), *places(pages, [0, 1, 2, 3]), pages.kv)
            found.append((features, drafts_after(head, pages, features[2:], torch.tensor([3, 5]), [0, 4])))
        torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
        assert found[0][1] == found[1][1]


def places(pages: Pages, positions: list[int]) -> tuple[Tensor, Tensor]:
    """Positions of the second sequence, and their slots."""
    return torch.tensor(positions), pages.slots(1, torch.tensor(positions))


def test_drafts_on_kernels_are_those_of_their_weights() -> None:
    run_interpreted(drafts_on_kernels)


@pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_draft_step_is_recorded(format: Format, tmp_path: Path) -> None:
    head, pages = loaded(write(tmp_path, config_of(format, SMALL), tensors_of(format, SMALL)), "native"), Pages()
    features, ids, batch = torch.randn(2, SMALL.hidden_size), torch.tensor([3, 5]), pages.batch([0, 0], [1, 1])
    sampling = reference_draft.drawn(torch.tensor([0.0, 1.0]), torch.tensor([4, 1 << 40]), torch.tensor([9, 11]))

    def draft() -> tuple[Drafted, Tensor]:
        drafted = head.step(features, ids, batch, batch.groups[0], pages.kv)
        return drafted, head.choose(drafted.normed_TH, sampling)

    with (recording := Recording()):
        drafted, chosen = draft()
    features.normal_(generator=torch.Generator().manual_seed(1))
    ids += 7
    recording.run()
    again, chosen_again = draft()
    assert torch.equal(drafted.normed_TH, again.normed_TH)
    assert torch.equal(chosen, chosen_again)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("greedy", [True, False])
def test_the_choice_among_a_slice_has_the_noise_of_the_target(greedy: bool, platform: str) -> None:
    temperature_N = torch.tensor([0.0, 0.5, 1.0] * 3)
    sampling = sampling_batch(9, CPU, greedy=greedy, temperature_N=temperature_N, position_N=torch.arange(9) + 5)
    x, weight, ids = torch.randn(9, 24), torch.randn(31, 24), torch.randperm(60)[:31]
    whole = torch.full((9, 60), -torch.inf).index_copy(1, ids, x @ weight.T)
    if not sampling.greedy:
        drawn = whole / sampling.temperature_N[:, None] + gumbel(sampling.seed_N, sampling.position_N, 60)
        whole = torch.where(sampling.temperature_N[:, None] > 0, drawn, whole)
    choose_draft = resolve_draft(CPU_TARGET, named(platform)).choose
    assert torch.equal(choose_draft(x, SliceOfHead(weight, ids), sampling), whole.argmax(-1))
    in_slice = choose_draft(x * torch.nan, SliceOfHead(weight, ids), sampling)
    assert set(in_slice.tolist()) <= set(ids.tolist()), "a row of NaN still gets a token of the slice"


def test_a_slice_of_a_large_vocabulary_has_the_frequent_tokens_and_those_of_the_format() -> None:
    ids = frequent(201088)
    assert len(ids) == len(ids.unique()) == MAX_DRAFTED
    assert {0, 30000, 199998, 200012, 201087} <= set(ids.tolist())


WRONG: dict[str, Callable[[dict[str, Any], dict[str, Tensor]], Any]] = {
    "hidden_size must be the target's": lambda c, t: c.update(hidden_size=64),
    "vocab_size must be the target's": lambda c, t: c.update(vocab_size=212),
    "target_layer_count must be the target's number of layers": lambda c, t: c.update(target_layer_count=36),
    "num_hidden_layers must be 1": lambda c, t: c.update(num_hidden_layers=2),
    "attention_bias must be False": lambda c, t: c.update(attention_bias=True),
    "rope_scaling.rope_type must be 'yarn' or 'default'": lambda c, t: c.update(rope_scaling={"rope_type": "llama3"}),
    "eagle_aux_hidden_state_layer_ids must be layers of a target with 4": lambda c, t: c.update(
        eagle_config={"eagle_aux_hidden_state_layer_ids": [24, 30, 36]}
    ),
    "use_last_layernorm must be True": lambda c, t: c["eagle_config"].update(use_last_layernorm=False),
    "draft_vocab_size must be at most 211": lambda c, t: c.update(draft_vocab_size=212),
    "intermediate_size must be a positive integer": lambda c, t: c.update(intermediate_size=None),
    "input_norm.weight is not a tensor of a head with this config.json": lambda c, t: c.update(
        eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
    ),
    "fc.weight is missing": lambda c, t: t.pop("fc.weight"),
    "d2t is missing": lambda c, t: c.update(draft_vocab_size=100),
    "norm.weight has dtype I64": lambda c, t: t.update({"norm.weight": torch.zeros(96, dtype=torch.int64)}),
    "fc.weight has shape [96, 192], not [96, 288]": lambda c, t: t.update({"fc.weight": torch.zeros(96, 192)}),
    "midlayer.mlp.up_proj.weight is also in": lambda c, t: t.update(
        {"layers.0.mlp.up_proj.weight": torch.zeros(80, 96)}
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named(message: str, tmp_path: Path) -> None:
    config, made = config_of(FORMATS[0], SMALL), tensors_of(FORMATS[0], SMALL)
    WRONG[message](config, made)
    with pytest.raises(ValueError) as caught:
        open_head(write(tmp_path, config, made), SMALL)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    format = FORMATS[3]
    made = tensors_of(format, SMALL)
    made["d2t"] = made["d2t"] + 200
    with pytest.raises(ValueError, match="d2t names tokens beyond the vocabulary of 211"):
        loaded(write(tmp_path, config_of(format, SMALL), made), "cpu")


def test_the_head_of_the_embedded_model_fits_it_and_its_budget() -> None:
    folder = NANO_FOLDER / "eagle3"
    head = open_head(folder, ModelConfig.from_file(NANO_FOLDER / "config.json"))
    assert head.config.draft_vocab_size == head.config.vocab_size
    assert sum(path.stat().st_size for path in folder.iterdir()) <= NANO_HEAD_BYTES
