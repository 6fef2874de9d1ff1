"""A tiny random gpt-oss, engines over it, and its expected tokens: a full recomputation of the sequence per token."""

from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from oscine.engine.core.extension import EngineExtension
from oscine.engine.core.loop import EngineLoop
from oscine.engine.core.offline import generate
from oscine.executor.drafts import MakeDrafts, no_drafts
from oscine.executor.kv.allocate import allocate_group, allocate_kv
from oscine.executor.kv.memory import MemoryPlan
from oscine.executor.runner import TorchExecutor
from oscine.executor.sampling.masks import GrammarCache
from oscine.executor.sampling.rules import GrammarRules
from oscine.executor.threaded import ThreadedExecutor
from oscine.kv_group import apart
from oscine.model.config import ModelConfig
from oscine.model.gpt_oss import GptOss
from oscine.model.random_weights import RandomTensors
from oscine.model.weights import load_weights
from oscine.ops.interface import Batch, PageGroup
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from oscine.types import Executor, GenerationOutput, GenerationRequest, SamplingParams
from tests.ops.bound import reference_ops
from tests.tiny import TINY

from .capturable import capturable_ops

PAGE = 16
MAX_MODEL_LEN = 160


class LivelyTensors(RandomTensors):
    """Larger attention and head, so that the next token depends on far more than the last one."""

    def get(self, name: str) -> Tensor:
        tensor = super().get(name)
        return tensor * 8 if name.endswith(("_proj.weight", "lm_head.weight")) else tensor


CPU = torch.device("cpu")
_known: dict[tuple[int, ...], Tensor] = {}  # tokens -> the logits after them


@cache
def model() -> GptOss:
    torch.set_num_threads(1)
    ops, source = reference_ops(), LivelyTensors(TINY, 3, CPU)
    return GptOss(TINY, load_weights(TINY, source, CPU, torch.float32, ops=ops), ops)


@cache
def capturable_model(device: torch.device) -> GptOss:
    """The same weights on any device."""
    ops, source = capturable_ops(device), LivelyTensors(TINY, 3, CPU)
    return GptOss(TINY, load_weights(TINY, source, device, torch.float32, ops=ops), ops)


def all_logits(tokens: list[int]) -> Tensor:
    """[tokens, V]: the model run once over the whole sequence, on pages of its own, one page for everything."""
    n = len(tokens)
    table, index = torch.zeros((1, 1), dtype=torch.int32), torch.arange(n)
    batch = Batch(
        token_ids_T=torch.tensor(tokens),
        positions_T=index,
        query_starts_S1=torch.tensor([0, n], dtype=torch.int32),
        context_lens_S=torch.tensor([n], dtype=torch.int32),
        groups=(PageGroup(table, index),) * 2,
        logits_rows_N=index,
    )
    kv = tuple(allocate_group(group, 1, CPU) for group in TINY.kv_groups(256, "float32"))
    return model().head(model().hidden(batch, kv))


def next_logits(tokens: tuple[int, ...]) -> Tensor:
    """[V]: of the token after these. Many cases have the same beginnings."""
    if tokens not in _known:
        _known[tokens] = all_logits([*tokens])[-1]
    return _known[tokens]


def recompute(prompt: list[int], said: list[int]) -> None:
    """Runs the model once over a sequence: next_logits then knows the logits after each token said, if it was right."""
    tokens = (*prompt, *said)
    logits = all_logits([*tokens])
    _known.update({tokens[:end]: logits[end - 1] for end in range(len(prompt), len(tokens) + 1)})


@cache
def naive_greedy(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(next_logits(tuple(tokens)).argmax()))
    return tokens[len(prompt) :]


def memory(num_full_pages: int, num_sliding_pages: int, config: ModelConfig = TINY) -> MemoryPlan:
    groups = config.kv_groups(PAGE, "float32")
    return MemoryPlan(
        weights=0,
        workspace=0,
        groups=groups,
        slots=apart((num_full_pages, num_sliding_pages), groups),
        max_model_len=MAX_MODEL_LEN,
        model_limit=TINY.max_position_embeddings,
    )


def options(**changes: object) -> EngineOptions:
    scheduler = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "overlap": False}
    return EngineOptions(
        model=ModelOptions(model="tiny"),
        cache=CacheOptions(page_size=PAGE, prefix_caching=bool(changes.pop("prefix_caching", True))),
        scheduler=replace(SchedulerOptions(), **{**scheduler, **changes}),  # type: ignore[arg-type]
    )


def executor(
    model: GptOss,
    options: EngineOptions,
    num_full_pages: int,
    num_sliding_pages: int,
    grammars: GrammarCache | None = None,
    make_drafts: MakeDrafts = no_drafts,
    max_drafts: int = 0,
) -> TorchExecutor:
    plan = memory(num_full_pages, num_sliding_pages, model.config)
    kv = allocate_kv(plan, model.weights.embed_VH.device, padding=True)
    new_rules = None if grammars is None else partial(GrammarRules, grammars)
    slots = options.scheduler.max_num_seqs
    return TorchExecutor(model, plan, kv, slots, new_rules, make_drafts=make_drafts, max_drafts=max_drafts)


def engine(options: EngineOptions, num_full_pages: int = 64, num_sliding_pages: int = 64) -> EngineLoop:
    """On the CPU."""
    runner = executor(model(), options, num_full_pages, num_sliding_pages)
    return loop(ThreadedExecutor(runner) if options.scheduler.overlap else runner, options, runner.memory)


def loop(executor: Executor, options: EngineOptions, memory: MemoryPlan, *extensions: EngineExtension) -> EngineLoop:
    return EngineLoop(
        executor,
        options,
        groups=memory.groups,
        memory=memory.slots,
        max_model_len=MAX_MODEL_LEN,
        extensions=[lambda loop, one=one: one for one in extensions],  # type: ignore[misc]
    )


def request(name: str, prompt: list[int], priority: int = 0, **sampling: object) -> GenerationRequest:
    values = {"max_tokens": 8, "temperature": 0.0, **sampling}
    return GenerationRequest(name, prompt, SamplingParams(**values), priority)  # type: ignore[arg-type]


def run(loop: EngineLoop, *requests: GenerationRequest) -> dict[str, GenerationOutput]:
    """Each request's outputs joined to one."""
    joined: dict[str, GenerationOutput] = {}
    for name, outputs in generate(loop, requests).items():
        first = outputs[0]
        joined[name] = replace(
            first,
            token_ids=[token for output in outputs for token in output.token_ids],
            logprobs=[entry for output in outputs for entry in output.logprobs or []],
            finish_reason=outputs[-1].finish_reason,
            error=outputs[-1].error,
        )
    return joined


def prompt(length: int, start: int = 1) -> list[int]:
    """Tokens that do not repeat soon, below the stop token."""
    return [(start * 31 + 7 * i * i + 3 * i) % 96 for i in range(length)]
