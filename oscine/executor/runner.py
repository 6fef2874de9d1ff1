"""Runs plans on one device: pages in, one model step, sampled tokens out.

Knows the order of things in a step. What a step uploads is in step_batch.py, what the device keeps in
device_state.py, how a token is chosen in sampler.py. On a GPU nothing but collect() waits for it.
"""

from collections import deque
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oscine.executor.cuda_graphs import CudaGraphs
from oscine.executor.device_state import DeviceState
from oscine.executor.headers import Few
from oscine.executor.kv.memory import MemoryPlan
from oscine.executor.launched import LaunchedStep, PromptRows
from oscine.executor.lockstep import Lockstep
from oscine.executor.logprobs import of_tokens, on_host
from oscine.executor.recorded_steps import MOST_BYTES, RecordedSteps
from oscine.executor.rules import Masks, NewRules, grammar_rules
from oscine.executor.sampler import AllowedTokens, Sampler
from oscine.executor.slots import ColumnArray, IntArray, PageEntries, Slots
from oscine.executor.step_batch import StepArrays, pack
from oscine.executor.transfer import Mark, download, send, upload
from oscine.model.gpt_oss import GptOss
from oscine.ops.interface import KVCache, Sampled
from oscine.ops.packed import PackedSizes, PackedStep
from oscine.ops.target import Alone, Communicator
from oscine.types import SamplingParams, StepPlan, StepResult


class Outcome(NamedTuple):
    """The results of a step, still on the device."""

    sampled: Sampled | None  # on the device; a row for each sequence that samples
    prompts: dict[int, PromptRows]  # by slot


class TorchExecutor:
    """An Executor: one model on one device, with room for max_num_seqs sequences."""

    def __init__(
        self,
        model: GptOss,
        memory: MemoryPlan,
        kv: KVCache,
        max_num_seqs: int,
        new_rules: NewRules | None = None,
        communicator: Communicator | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        """Without `new_rules`, sequences that have a grammar end with an error. `communicator`: the model's own.

        With `lockstep`, the last page of each group belongs to no sequence: steps without one write there.
        """
        self.communicator = communicator or Alone()
        self.config, self.memory, self.max_num_seqs = model.config, memory, max_num_seqs
        self.device = model.weights.device
        self._model, self._kv = model, kv
        self.state = DeviceState(
            max_num_seqs, memory.max_model_len, memory.page_size, len(memory.groups), self.device, model.ops
        )
        self.lockstep = lockstep
        if lockstep is not None:
            self.state.point_padding_at([len(pages) - 1 for pages in kv])
        self._slots = Slots(max_num_seqs + 1)  # with the padding slot
        self._sampler = Sampler(max_num_seqs, model.config.vocab_size, self.device, model.ops.sample)
        self._new_rules = new_rules or grammar_rules(None, model.config.vocab_size)
        self._rules = self._new_rules(max_num_seqs, self.device)
        self._prompt_logprobs: dict[int, int] = {}  # slot -> how many of the most probable tokens
        self.graphs = CudaGraphs(self._decode, self._choose_greedily, self.device)
        self._recorded: CudaGraphs | RecordedSteps = self.graphs
        self._launched: deque[LaunchedStep] = deque()

    @property
    def num_pages(self) -> list[int]:
        """Pages that sequences may have, per group."""
        return [len(pages) - (self.lockstep is not None) for pages in self._kv]

    @property
    def kv(self) -> KVCache:
        """Where the pages are; it stays where it is."""
        return self._kv

    def of_each_kind(self) -> "TorchExecutor":
        """An executor of its own, of one layer of each kind, on the same weights and cache: to rehearse."""
        layers = self._model.of_layers(self._model.layer_of_each_kind)
        others = self.communicator, self.lockstep
        return TorchExecutor(layers, self.memory, self._kv, self.max_num_seqs, self._new_rules, *others)

    def record_steps(self, most_bytes: int = MOST_BYTES) -> None:
        """From now on decode steps are recorded C calls: on a CPU, with native ops. Raises NotRecordable."""
        steps = RecordedSteps(self._decode, self._choose_greedily, most_bytes)
        steps.try_one(self.state.padding_slot)
        self._recorded = steps
        self.forget_page_zero()

    def forget_page_zero(self) -> None:
        """Zeroes it in all groups; no sequence may hold it."""
        for pages in self._kv:
            pages[0].zero_()

    def prepare(self, sampling: SamplingParams) -> bool:
        """Whether its grammar is compiled."""
        return self._rules.ready(sampling)

    def execute(self, plan: StepPlan) -> StepResult:
        self.launch(plan)
        return self.collect()

    def collect(self) -> StepResult:
        return self._launched.popleft().result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        self._place(plan)
        step = StepArrays.of(plan.sequences)
        prompt_rows = self._prompt_rows(step) if self._prompt_logprobs else {}
        size = self._graph_size(step, suits=not prompt_rows and self._recorded.fits(step))
        outcome = self._run(step, prompt_rows) if size is None else self._replay(step, size)
        slots_M = step.slots_S[step.samples_S]
        launched = LaunchedStep(
            step=plan.step,
            slots_S=step.slots_S,
            samples_S=step.samples_S,
            sampled=None if outcome.sampled is None else on_host(outcome.sampled),
            num_logprobs=self._sampler.num_logprobs(slots_M),
            prompts=outcome.prompts,
            errors=self._rules.errors(step.slots_S.tolist()),
            rank_error=self._rank_error(),
            done=Mark(self.device),
        )
        self._rules.sampled(slots_M, step.ends_S[step.samples_S], cache(launched.token_ids))
        self._launched.append(launched)

    @torch.inference_mode()
    def take_part(self) -> None:
        """Runs a step without sequences, if other ranks have begun one: their tokens need the experts of this one."""
        if self.lockstep is None or not self.lockstep.is_awaited:
            return
        step = StepArrays.of_padding(self.state.padding_slot)
        size = self._graph_size(step, suits=self._recorded.fits_padding)
        if size is None:
            self._run(step, {})
        else:
            self._recorded.replay(self._pack_padded(step.padded(size)))

    def _graph_size(self, step: StepArrays, suits: bool) -> int | None:
        """The size of the CUDA graph that runs the step; None: it runs eagerly. All ranks decide the same."""
        num_tokens = step.num_tokens
        if self.lockstep is not None:
            tokens_by_rank, suits = self.lockstep.begin(num_tokens, suits)
            num_tokens = max(tokens_by_rank)
        size = self._recorded.size_of(num_tokens) if suits else None
        if size is not None and self.lockstep is not None:
            self.lockstep.pad(size)
        return size

    def _rank_error(self) -> Tensor | None:
        failed = None if self.lockstep is None else self.lockstep.exchange.failed
        return None if failed is None else download(failed)

    def _place(self, plan: StepPlan) -> None:
        entries: PageEntries = [[] for _ in range(2 + len(self._kv))]
        for new in plan.new:
            self._slots.assign(new, entries)
            self._sampler.assign(new)
            self._rules.assign(new)
            self._prompt_logprobs.pop(new.slot, None)
            if new.sampling.prompt_logprobs is not None:
                self._prompt_logprobs[new.slot] = new.sampling.prompt_logprobs
        for sequence in plan.sequences:
            self._slots.extend(sequence, entries)
        self.state.update_pages(entries)

    def _run(self, step: StepArrays, prompt_rows: dict[int, IntArray]) -> Outcome:
        slots_M, positions_M = step.slots_S[step.samples_S], step.ends_S[step.samples_S]
        last_rows_M = step.query_starts_S1[1:][step.samples_S] - 1
        flat, sizes = pack(step, self._slots, np.concatenate((last_rows_M, *prompt_rows.values())), slots_M)
        packed = PackedStep.of(upload(flat, self.device), sizes)
        x_NH = self._model.hidden(self.state.batch(packed, step.num_decodes), self._kv)
        sampled = None
        if sizes.sampled:
            ruled = self._ruled(slots_M, positions_M)
            sampled = self._sample(x_NH[: sizes.sampled], slots_M, positions_M, ruled)
            self.state.write_back(packed.sampled_slots_M, sampled.token_ids_N)
        return Outcome(sampled, self._of_prompts(step, prompt_rows, x_NH[sizes.sampled :]))

    def _replay(self, step: StepArrays, size: int) -> Outcome:
        count = len(step.slots_S)
        packed, x_NH = self._recorded.replay(self._pack_padded(step if size == count else step.padded(size)))
        ruled = self._ruled(step.slots_S, step.ends_S)
        if ruled is None and self._sampler.wants_argmax(step.slots_S):
            return Outcome(Sampled(self._recorded.replay_choice(size)[:count]), {})
        sampled = self._sample(x_NH[:count], step.slots_S, step.ends_S, ruled)
        self.state.write_back(packed.sampled_slots_M[:count], sampled.token_ids_N)
        return Outcome(sampled, {})

    def _pack_padded(self, padded: StepArrays) -> tuple[ColumnArray, PackedSizes]:
        sampled_slots_M = np.where(padded.samples_S, padded.slots_S, self.state.padding_slot)
        return pack(padded, self._slots, np.arange(len(padded.slots_S)), sampled_slots_M)

    def _sample(
        self, x_NH: Tensor, slots_N: IntArray, positions_N: IntArray, ruled: AllowedTokens | Few | None
    ) -> Sampled:
        """A token a row of what the head takes."""
        if isinstance(ruled, AllowedTokens) or not self._sampler.is_plain(slots_N):
            assert not isinstance(ruled, Few)
            return self._sampler.sample(self._model.head(x_NH), slots_N, positions_N, ruled)
        ids_N = self._model.choose(x_NH, self._sampler.plain(slots_N, positions_N))
        if ruled is not None:
            ids_N = self._sampler.narrowed(ids_N, x_NH, self._model.choose_few, slots_N, positions_N, ruled)
        return Sampled(ids_N)

    def _ruled(self, slots_N: IntArray, positions_N: IntArray) -> AllowedTokens | Few | None:
        """The tokens that the rules allow, on the device.

        Waits for the tokens of the step before this one. So call it after this step's work is queued on the device.
        """
        allowed = self._rules.allowed(slots_N, positions_N, self._sampler.is_plain)
        if isinstance(allowed, Masks):
            return AllowedTokens(send(allowed.masks_KW, self.device), allowed.row_N)
        return allowed

    def _decode(self, packed: PackedStep[Tensor]) -> Tensor:
        """The first CUDA graph: one token per sequence, up to the input of the head."""
        if self.lockstep is not None:
            self.lockstep.pad(len(packed.slots_S))
        return self._model.hidden(self.state.batch(packed, len(packed.slots_S), all_rows=True), self._kv)

    def _choose_greedily(self, packed: PackedStep[Tensor], x_NH: Tensor) -> Tensor:
        """The second CUDA graph: chooses the most probable tokens and writes them back."""
        ids_N = self._model.choose(x_NH, self._sampler.greedy(len(x_NH)))
        self.state.write_back(packed.sampled_slots_M, ids_N)
        return ids_N

    def _prompt_rows(self, step: StepArrays) -> dict[int, IntArray]:
        """Index of a sequence in the step -> rows of its tokens that are followed by another token of the prompt."""
        rows: dict[int, IntArray] = {}
        for i, slot in enumerate(step.slots_S.tolist()):
            if slot in self._prompt_logprobs:
                num_followed = min(step.ends_S[i], self._slots.num_prompt_tokens[slot] - 1) - step.starts_S[i]
                if num_followed > 0:
                    rows[i] = step.query_starts_S1[i] + np.arange(num_followed)
        return rows

    def _of_prompts(self, step: StepArrays, rows: dict[int, IntArray], x_NH: Tensor) -> dict[int, PromptRows]:
        """Log-probabilities of prompt tokens, by slot. x_NH: the head's input for all `rows`, in order."""
        found: dict[int, PromptRows] = {}
        if not rows:
            return found
        parts = x_NH.split_with_sizes([len(of_sequence) for of_sequence in rows.values()])
        for i, x_of_sequence in zip(rows, parts, strict=True):
            slot, start = int(step.slots_S[i]), int(step.starts_S[i]) + 1
            token_ids, num_top = self._slots.given(slot, start, start + len(x_of_sequence)), self._prompt_logprobs[slot]
            found[slot] = PromptRows(on_host(of_tokens(self._model.head, x_of_sequence, token_ids, num_top)), num_top)
        return found
