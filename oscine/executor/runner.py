"""Runs plans on one device: slots in, one model step, sampled tokens out.

Knows the order of things in a step. What a batch looks like is in batch.py, how a token is chosen in sampler.py.
"""

from collections.abc import Callable
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oscine.config import EngineOptions
from oscine.executor.batch import StepArrays, build_batch
from oscine.executor.kv_memory import MemoryPlan, plan_memory
from oscine.executor.logprobs import of_tokens
from oscine.executor.sampler import Sampler
from oscine.executor.slots import IntArray, Slots
from oscine.model.config import ModelConfig
from oscine.model.gpt_oss import GptOss, kv_shape
from oscine.model.opened_model import open_model
from oscine.model.weights import tensor_specs
from oscine.ops.interface import KvCache
from oscine.ops.resolve import choose, describe, resolve
from oscine.types import StepPlan, StepResult, TokenLogprobs

BoolArray = NDArray[np.bool_]


class TorchExecutor:
    """An Executor: one model on one device, with the KV cache of a memory plan and room for max_num_seqs sequences."""

    def __init__(self, model: GptOss, memory: MemoryPlan, max_num_seqs: int) -> None:
        self.config, self.memory = model.config, memory
        self._model = model
        self._device = model.weights.embed_VH.device
        self._kv = allocate_kv(model.config, memory, self._device, model.weights.embed_VH.dtype)
        self._slots = Slots(max_num_seqs, memory.max_model_len, memory.page_size)
        self._sampler = Sampler(max_num_seqs, model.config.vocab_size, self._device, model.ops.sample)
        self._prompt_logprobs: dict[int, int] = {}  # slot -> how many of the most probable tokens

    @classmethod
    def load(cls, options: EngineOptions, report: Callable[[str], None]) -> "TorchExecutor":
        """Reports the memory plan, then loads. Raises ValueError for what is wrong with the model or does not fit."""
        opened = open_model(options.model)
        ops = resolve(opened.device.type)
        memory = plan_memory(opened.config, options, weight_bytes(opened.config, opened.dtype), opened.dtype.itemsize)
        if not options.quiet:
            report(f"{memory}\nops: {describe(choose(opened.device.type))}")
        model = GptOss(opened.config, opened.load(progress=not options.quiet), ops)
        return cls(model, memory, options.scheduler.max_num_seqs)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        for new in plan.new:
            self._slots.place(new)
            self._sampler.place(new)
            self._prompt_logprobs.pop(new.slot, None)
            if new.sampling.prompt_logprobs is not None:
                self._prompt_logprobs[new.slot] = new.sampling.prompt_logprobs
        for sequence in plan.sequences:
            self._slots.extend(sequence)
        step = StepArrays.of(plan.sequences)
        sampled_S = np.array([s.sample for s in plan.sequences])
        prompt_rows = self._prompt_rows(step) if self._prompt_logprobs else {}
        rows_N = np.concatenate((step.query_starts_S1[1:][sampled_S] - 1, *prompt_rows.values()))
        logits_NV = self._model.forward(build_batch(step, self._slots, rows_N, self._device), self._kv)
        result = self._sample(plan, step, sampled_S, logits_NV)
        if prompt_rows:
            result.prompt_logprobs = self._of_prompts(step, prompt_rows, logits_NV[int(sampled_S.sum()) :])
        return result

    def _sample(self, plan: StepPlan, step: StepArrays, sampled_S: BoolArray, logits_NV: Tensor) -> StepResult:
        """Samples from the leading rows of logits and appends each token to its slot."""
        token_ids: list[list[int]] = [[] for _ in plan.sequences]
        logprobs: list[list[TokenLogprobs] | None] = [None] * len(token_ids)
        slots_N, positions_N = step.slots_S[sampled_S], step.ends_S[sampled_S]
        if not len(slots_N):
            return StepResult(plan.step, token_ids)
        ids, found = self._sampler.sample(logits_NV[: len(slots_N)], slots_N, positions_N)
        self._slots.token_ids[slots_N, positions_N] = ids
        for row, sequence in enumerate(sampled_S.nonzero()[0].tolist()):
            token_ids[sequence] = [ids[row]]
            if found is not None:
                logprobs[sequence] = found[row]
        return StepResult(plan.step, token_ids, logprobs if found is not None else None)

    def _prompt_rows(self, step: StepArrays) -> dict[int, IntArray]:
        """Index of a sequence in the step -> those of its tokens that are followed by a token of the prompt."""
        rows: dict[int, IntArray] = {}
        for i, slot in enumerate(step.slots_S.tolist()):
            if slot in self._prompt_logprobs:
                num_followed = min(step.ends_S[i], self._slots.num_prompt_tokens[slot] - 1) - step.starts_S[i]
                if num_followed > 0:
                    rows[i] = step.query_starts_S1[i] + np.arange(num_followed)
        return rows

    def _of_prompts(
        self, step: StepArrays, rows: dict[int, IntArray], logits_NV: Tensor
    ) -> dict[int, list[TokenLogprobs]]:
        """By slot; logits are those of all the rows, in order."""
        found: dict[int, list[TokenLogprobs]] = {}
        first_row = 0
        for i, rows_of_sequence in rows.items():
            slot, start, length = int(step.slots_S[i]), int(step.starts_S[i]) + 1, len(rows_of_sequence)
            token_ids: list[int] = self._slots.token_ids[slot, start : start + length].tolist()
            logits = logits_NV[first_row : first_row + length]
            found[slot] = of_tokens(logits, token_ids, self._prompt_logprobs[slot])
            first_row += length
        return found


def allocate_kv(config: ModelConfig, memory: MemoryPlan, device: torch.device, dtype: torch.dtype) -> KvCache:
    """Zeros, not garbage: attention multiplies what it masks by zero, and zero times NaN is NaN."""

    def group(num_layers: int, num_pages: int) -> Tensor:
        return torch.zeros(kv_shape(config, num_layers, num_pages, memory.page_size), dtype=dtype, device=device)

    return KvCache(
        full=group(config.num_full_layers, memory.num_full_pages),
        sliding=group(config.num_sliding_layers, memory.num_sliding_pages),
    )


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """On the device: MXFP4 stays packed, everything else is cast to dtype."""
    return sum(
        spec.num_bytes if spec.dtype == "U8" else prod(spec.shape) * dtype.itemsize
        for spec in tensor_specs(config).values()
    )
