"""Runs plans on one device: pages in, one model step, sampled tokens out.

Knows the order of things in a step; each thing is a part of its own. What a step uploads is in step_arrays.py, what the
device keeps in device_state.py, the model's pass in forward.py, as a graph in step_graphs.py, how a token is chosen in
choice.py. On a GPU nothing but collect() waits for it, unless a sequence has drafts.
"""

from collections import deque
from functools import partial

import torch

from oscine.executor.adapters import NoAdapters
from oscine.executor.batch.copies import Mark, download
from oscine.executor.batch.device_state import DeviceState
from oscine.executor.batch.slots import IntArray, PageEntries, Rows, Slots
from oscine.executor.batch.step_arrays import StepArrays
from oscine.executor.drafts import Drafts, MakeDrafts, StepParts, no_drafts
from oscine.executor.forward import Forward
from oscine.executor.known import KnownTokens
from oscine.executor.kv.memory import MemoryPlan
from oscine.executor.launched import LaunchedStep
from oscine.executor.lockstep import OwnSteps
from oscine.executor.sampling.choice import Choice
from oscine.executor.sampling.logprobs import on_host
from oscine.executor.sampling.prompt_logprobs import PromptLogprobs
from oscine.executor.sampling.rules import NewRules, grammar_rules
from oscine.executor.steps import Steps
from oscine.model.gpt_oss import GptOss
from oscine.ops.interface import KVCache
from oscine.ops.target import Alone, Communicator
from oscine.types import SamplingParams, StepPlan, StepResult


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
        lockstep: OwnSteps | None = None,
        make_drafts: MakeDrafts = no_drafts,
        max_drafts: int = 0,
        adapters: NoAdapters | None = None,
    ) -> None:
        """Without `new_rules`, sequences that have a grammar end with an error. `communicator`: the model's own.
        `lockstep`: how engines that share experts agree on steps.

        Plans have no more than `max_drafts` drafts per sequence. `kv` may have a padding page in each group, beyond the
        pages of `memory`. Shared steps and graphs of prompts need it.
        """
        self.communicator = communicator or Alone()
        self.config, self.memory, self.max_num_seqs = model.config, memory, max_num_seqs
        self.device, self.kv, self.max_drafts = model.weights.device, kv, max_drafts
        self._make_drafts = make_drafts
        self._model, self._lockstep = model, lockstep or OwnSteps()
        state = self.state = DeviceState(
            max_num_seqs, memory.max_model_len, memory.page_size, len(memory.groups), self.device, model.ops, max_drafts
        )
        if len(kv[0]) > memory.num_pages[0]:
            state.point_padding_at([len(pages) - 1 for pages in kv])
        self._slots = Slots(max_num_seqs + 1)  # with the padding slot
        new_rules = new_rules or grammar_rules(None, model.config.vocab_size, at_once=False)
        self._choice = Choice(model, state, max_num_seqs, new_rules)
        self._known = KnownTokens(self._slots, lambda slot, token_ids: self.drafts.append(slot, token_ids))
        self._prompts = PromptLogprobs(self._slots, model.head)
        self.drafts = make_drafts(StepParts(state, self._slots, self._known, self._choice.rules, memory.page_size))
        self.adapters = adapters or NoAdapters()
        forward = Forward(model, kv, state, self._lockstep, self.drafts, self.adapters)
        parts = forward, self._choice, self._prompts, self.drafts, state, self._slots, self._lockstep
        self._steps = Steps(*parts, self.adapters)
        self.graphs = self._steps.graphs
        self._launched: deque[LaunchedStep] = deque()

    def of_each_kind(self, new_rules: NewRules) -> "TorchExecutor":
        """An executor for warm-up: one layer of each kind, and the same weights, KV cache and draft head."""
        kinds = self._model.layer_of_each_kind
        layers, adapters = self._model.of_layers(kinds), self.adapters.of_layers(kinds)
        others = self.communicator, self._lockstep
        own = layers, self.memory, self.kv, self.max_num_seqs, new_rules
        head = (self._make_drafts, self.max_drafts) if self.drafts.aux_layers else (no_drafts, 0)
        return TorchExecutor(*own, *others, *head, adapters)

    def forget_page_zero(self) -> None:
        """Zeroes it in all groups; no sequence may hold it."""
        for pages in self.kv:
            pages[0].zero_()

    def prepare(self, sampling: SamplingParams) -> bool:
        """Whether its grammar is compiled. If not, that begins."""
        return self._choice.rules.ready(sampling)

    def execute(self, plan: StepPlan) -> StepResult:
        self.launch(plan)
        return self.collect()

    @property
    def is_done(self) -> bool:
        """Whether the oldest launched step is done."""
        return self._launched[0].done.passed

    def collect(self) -> StepResult:
        launched = self._launched.popleft()
        self._known.read(launched.number + 1)
        return launched.result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        drafts = self.drafts.before_placing(plan)
        if plan.adapters:
            self.adapters.change(plan.adapters)
        self._place(plan)
        drafts = drafts or self.drafts.after_placing(plan)
        step = StepArrays.of(plan.sequences, None if drafts is None else drafts.counts)
        rows = self._rows(plan.step, step, drafts)
        prompt_rows = self._prompts.rows(step)
        outcome = self._steps.run(step, rows, prompt_rows, self.drafts.follows(plan, step))
        failed = self._lockstep.failed
        launched = LaunchedStep(
            number=plan.step,
            step=step,
            rows=rows,
            owners_N=self._slots.owners[rows.slots_N],
            sampled=None if outcome.sampled is None else on_host(outcome.sampled),
            num_logprobs=self._choice.num_logprobs(rows.slots_N),
            prompts=outcome.prompts,
            errors=self._choice.rules.errors([s.slot for s in plan.sequences]),
            rank_error=None if failed is None else download(failed),
            done=Mark(self.device),
        )
        self._choice.rules.sampled(rows, partial(self._tokens_of, launched))
        self._launched.append(launched)
        if self.max_drafts:
            self._known.add(launched)

    @torch.inference_mode()
    def take_part(self) -> None:
        """Runs a step without sequences, if other ranks have begun one: their tokens need the experts of this one."""
        if not self._lockstep.is_awaited:
            return
        step = StepArrays.of_padding(self.state.padding_slot)
        self._steps.run_padding(step, self._rows(0, step, None))

    def _place(self, plan: StepPlan) -> None:
        entries: PageEntries = [[] for _ in range(2 + len(self.kv))]
        if plan.new:
            self.drafts.ends(plan.new)
        for new in plan.new:
            self._slots.assign(new, entries)
            for part in (self._choice, self.drafts, self._prompts, self.adapters):
                part.assign(new)
        for sequence in plan.sequences:
            self._slots.extend(sequence, entries)
        self.state.update_pages(entries)

    def _rows(self, number: int, step: StepArrays, drafts: Drafts | None) -> Rows:
        if self.max_drafts:
            return self._known.rows(number, step, None if drafts is None else drafts.ids)
        ends_N, places_N = step.ends_S[step.samples_S], step.places_S[step.samples_S]
        return Rows(step.slots_S[step.samples_S], places_N, lambda: ends_N, lambda: places_N)

    def _tokens_of(self, launched: LaunchedStep) -> IntArray:
        self._known.read(launched.number + 1)
        return launched.token_ids()
