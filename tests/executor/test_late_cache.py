"""A KV cache whose memory is mapped last gives the same tokens as one that has it from the beginning. Needs a GPU."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from oscine.checkpoint.hub import NANO_FOLDER, config_at
from oscine.engine.build import build_engine
from oscine.engine.core.loop import EngineLoop
from oscine.kv_group import shared
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions

from .tiny import request, run

pytestmark = pytest.mark.gpu
OPTIONS = EngineOptions(
    ModelOptions(str(NANO_FOLDER), device="cuda", dtype="bfloat16", max_model_len=2048),
    CacheOptions(),
    replace(SchedulerOptions(), max_num_seqs=48, max_num_batched_tokens=1024),
    quiet=True,
)
CACHE_BYTES = 10 << 20  # too little for 48 sequences


def answers(loop: EngineLoop) -> list[dict[str, list[int]]]:
    """Two turns of 96 conversations, the latest first in the second one: it still has its pages."""
    prompts = {str(i): [(7 * k * k + 3 * i) % 1900 for k in range(5 + 37 * i % 500)] for i in range(96)}
    found = []
    for _ in range(2):
        asked = (request(name, tokens, max_tokens=100 + len(tokens) % 200) for name, tokens in prompts.items())
        found.append({name: list(output.token_ids) for name, output in run(loop, *asked).items()})
        prompts = {name: [*tokens, *found[-1][name], *tokens[:20]] for name, tokens in reversed(prompts.items())}
    return found


def test_tokens_are_those_of_a_cache_that_was_there_from_the_beginning() -> None:
    """Sequences are preempted and cached pages evicted, in the same steps of both."""
    with_cache = partial(replace, OPTIONS.cache)
    free = torch.cuda.mem_get_info()[0]
    late = build_engine(replace(OPTIONS, cache=with_cache(kv_cache_free_gpu_memory_fraction=CACHE_BYTES / free))).loop
    found, stats = answers(late), late.stats()
    assert 0 < stats.prefix_hits < stats.prefix_queries
    slot_bytes = shared(config_at(NANO_FOLDER).kv_groups(OPTIONS.cache.page_size, "bfloat16")).slot_bytes
    del late
    same = with_cache(kv_cache_bytes=stats.kv_slots_total * slot_bytes)
    early = build_engine(replace(OPTIONS, cache=same)).loop
    assert early.stats().kv_slots_total == stats.kv_slots_total
    assert answers(early) == found
    assert early.stats().preemptions == stats.preemptions
