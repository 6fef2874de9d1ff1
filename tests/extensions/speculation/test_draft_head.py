"""Heads that do not suit their model are named before anything is loaded."""

import re
from typing import Any

import pytest
import torch

from oscine.checkpoint.hub import NANO_FOLDER
from oscine.checkpoint.opened import open_model
from oscine.executor.start.build import build_executor
from oscine.extensions.speculation.eagle.find import OF_NANO, DraftHead, find_draft_head
from oscine.settings.config import EngineOptions, ModelOptions, SpeculationOptions
from tests.executor.tiny import memory

NANO = ModelOptions(str(NANO_FOLDER), device="cpu")


def find(model: str | None, options: ModelOptions = NANO, *, alone: bool = True) -> DraftHead:
    asked = EngineOptions(options, speculation=SpeculationOptions(method="eagle3", model=model))
    found = find_draft_head(asked, open_model(options), alone=alone)
    assert found is not None
    return found


def test_the_embedded_model_has_a_head_of_its_own() -> None:
    own, named = find(None), find(str(OF_NANO))
    assert own.opened.config == named.opened.config
    assert own.num_bytes(torch.float32) > 4 * 1_400_000


def test_no_head_is_sought_without_speculation() -> None:
    assert find_draft_head(EngineOptions(NANO), open_model(NANO), alone=True) is None


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/nowhere/at/all"])
def test_a_missing_head_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"head {name!r} is neither a folder nor a Hugging Face name"):
        find(name)


def test_a_model_without_a_head_of_its_own_needs_one() -> None:
    with pytest.raises(ValueError, match="eagle3 needs `model`, the folder of a head or its Hugging Face name"):
        find(None, ModelOptions(random_weights="20b", device="cpu"))


def test_a_head_needs_a_model_on_one_device() -> None:
    with pytest.raises(ValueError, match="an EAGLE-3 head needs a model on one GPU"):
        find(None, alone=False)


@pytest.mark.parametrize("method", ["auto", "ngram", "eagle3"])
def test_a_scripted_text_has_no_drafts(method: Any) -> None:
    named = f"--speculative-config {method} needs a model: --executor fake has none"
    with pytest.raises(ValueError, match=named):
        build_executor(EngineOptions(NANO, executor="fake", speculation=SpeculationOptions(method)))


def test_a_scripted_text_has_no_experts_to_keep_on_the_host() -> None:
    with pytest.raises(ValueError, match="--experts-on-host auto needs a model: --executor fake has none"):
        build_executor(EngineOptions(ModelOptions(str(NANO_FOLDER), experts_on_host="auto"), executor="fake"))


def test_a_head_for_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("config.json: hidden_size must be the target's (2880), not 256")):
        find(str(OF_NANO), ModelOptions(random_weights="20b", device="cpu"))


def test_the_layer_of_the_head_is_the_last_of_a_group_with_its_window() -> None:
    head = find(None)
    groups = open_model(NANO).config.kv_groups(16, "float32")
    beside = head.beside(groups)
    assert [group.layers for group in beside] == [(*groups[0].layers, 6), groups[1].layers]
    kv = tuple(torch.arange(len(group.layers)).view(1, -1, 1, 1, 1, 1).float() for group in beside)
    group, pages = head.pages(beside, kv)
    assert (group, pages.flatten().tolist()) == (0, [3.0])


def test_a_head_with_other_kv_heads_is_refused() -> None:
    with pytest.raises(
        ValueError, match="the EAGLE-3 head has 2 KV heads of 64, window None; the model has only: 2 of"
    ):
        find(None).beside(memory(4, 4).groups)
