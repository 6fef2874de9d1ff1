"""Runs plans on one device: pages in, one model step, sampled tokens out.

Knows the order of things in a step. What a step uploads is in step_batch.py, what the device keeps in
device_state.py, how a token is chosen in sampler.py. On a GPU nothing but collect() waits for it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oscine.executor.cuda_graphs import Computed, DecodeGraphs, PromptGraphs
from oscine.executor.device_state import DeviceState
from oscine.executor.drafter import DeviceDrafter, HostDrafter
from oscine.executor.headers import Few
from oscine.executor.kv.memory import LOGITS_AT_ONCE, MemoryPlan
from oscine.executor.launched import LaunchedStep, PromptRows
from oscine.executor.logprobs import of_tokens, on_host
from oscine.executor.recorded_steps import MOST_BYTES, RecordedSteps
from oscine.executor.rules import Masks, NewRules, grammar_rules
from oscine.executor.sampler import AllowedTokens, Sampler
from oscine.executor.slots import ColumnArray, IntArray, PageEntries, Rows, Slots
from oscine.executor.step_batch import StepArrays, pack
from oscine.executor.transfer import Mark, download, send, upload
from oscine.extensions.parallel.lockstep import Lockstep
from oscine.model.gpt_oss import GptOss
from oscine.ops.interface import Batch, KVCache, Sampled, SamplingBatch
from oscine.ops.packed import PackedSizes, PackedStep
from oscine.ops.target import Alone, Communicator
from oscine.types import DecodeTimes, NewSequence, SamplingParams, StepPlan, StepResult


class Outcome(NamedTuple):
    """The results of a step, still on the device."""

    sampled: Sampled | None  # on the device; a row for each sequence that samples
    prompts: dict[int, PromptRows]  # by slot


class Drafts(NamedTuple):
    """What the sequences of a plan verify."""

    counts: list[int]  # per sequence
    ids: Callable[[], IntArray]  # per row of StepArrays; anything in rows that compute no draft; may wait


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
        drafter: HostDrafter | None = None,
        max_drafts: int = 0,
    ) -> None:
        """Without `new_rules`, sequences that have a grammar end with an error. `communicator`: the model's own.

        Plans have no more than `max_drafts` drafts per sequence, and none without a `drafter`. `kv` may have a padding
        page in each group, beyond the pages of `memory`. `lockstep` and graphs of prompts need it.
        """
        self.communicator = communicator or Alone()
        self.config, self.memory, self.max_num_seqs = model.config, memory, max_num_seqs
        self.device = model.weights.device
        self._model, self._kv = model, kv
        self.state = DeviceState(
            max_num_seqs,
            memory.max_model_len,
            memory.page_size,
            len(memory.groups),
            self.device,
            model.ops,
            max_drafts,
        )
        self._drafter, self.max_drafts = drafter, max_drafts
        self._device_drafter: DeviceDrafter | None = None
        self.lockstep = lockstep
        self._has_padding_page = len(kv[0]) > memory.num_pages[0]
        if self._has_padding_page:
            self.state.point_padding_at([len(pages) - 1 for pages in kv])
        self._slots = Slots(max_num_seqs + 1)  # with the padding slot
        self._sampler = Sampler(max_num_seqs, model.config.vocab_size, self.device, model.ops.sample)
        self._new_rules = new_rules or grammar_rules(None, model.config.vocab_size)
        self._rules = self._new_rules(max_num_seqs, self.device)
        self._prompt_logprobs: dict[int, int] = {}  # slot -> how many of the most probable tokens
        self.decode_graphs = DecodeGraphs(self._decode, self._choose_greedily, self.device)
        self.prompt_graphs = PromptGraphs(self._compute, self.state.padding_slot, self.device)
        self.followed_graphs = self.decode_graphs  # of steps that also fill the head's layer
        self._recorded: DecodeGraphs | RecordedSteps = self.decode_graphs
        self._followed: DecodeGraphs | RecordedSteps = self._recorded
        self.decode_times: dict[int, DecodeTimes] | None = None  # see time_decodes
        self._is_behind = np.zeros(max_num_seqs + 1, np.bool_)  # by slot: the last step did not fill the head's layer
        self._launched: deque[LaunchedStep] = deque()
        self._unread: deque[LaunchedStep] = deque()  # whose tokens the host has not counted; with drafts only

    @property
    def kv(self) -> KVCache:
        """Where the pages are; it stays where it is."""
        return self._kv

    def of_each_kind(self) -> "TorchExecutor":
        """An executor of its own, of one layer of each kind, on the same weights and cache: to rehearse."""
        layers = self._model.of_layers(self._model.layer_of_each_kind)
        others = self.communicator, self.lockstep
        return TorchExecutor(layers, self.memory, self._kv, self.max_num_seqs, self._new_rules, *others)

    def draft_with(self, drafter: DeviceDrafter) -> None:
        """From now on a head drafts on the device."""
        self._device_drafter = drafter
        decode = partial(self._decode, follows=True)
        self._followed = self.followed_graphs = DecodeGraphs(decode, self._choose_greedily, self.device)

    @contextmanager
    def drafting_with(self, drafter: HostDrafter) -> Iterator[None]:
        """Replaces the drafter for the time of the context. No sequence may be running."""
        own, self._drafter = self._drafter, drafter
        try:
            yield
        finally:
            self._drafter = own

    def capture_drafts(self, sizes: list[int]) -> None:
        """CUDA graphs of drafts, for up to so many sequences. Writes page 0."""
        assert self._device_drafter is not None
        self._device_drafter.capture(sizes, self.max_drafts)

    @torch.inference_mode()
    def run_graphs_eagerly(self, decode_sizes: list[int], prompt_sizes: list[int]) -> None:
        """What `capture` would capture: compiles kernels and takes memory. Writes page 0."""
        self.prompt_graphs.run_eagerly(prompt_sizes)
        self.followed_graphs.run_eagerly(decode_sizes)

    def capture(self, decode_sizes: list[int], prompt_sizes: list[int]) -> None:
        """CUDA graphs of decode steps by sequences, and of steps with prompts by tokens, the larger ones first.

        Where a head drafts, steps without drafts have graphs of their own, which do no work for it.
        """
        has_head, most = self._device_drafter is not None, self.max_num_seqs
        plain = [size for size, below in zip(decode_sizes, (0, *decode_sizes), strict=False) if below < most]
        assert self._has_padding_page or not prompt_sizes
        pool = torch.cuda.graph_pool_handle()
        self.prompt_graphs.capture(prompt_sizes, pool)
        self.followed_graphs.capture(decode_sizes, pool)
        if has_head:
            self.decode_graphs.capture(plain, pool)

    def record_steps(self, most_bytes: int = MOST_BYTES) -> None:
        """From now on decode steps are recorded C calls: on a CPU, with native ops. Raises NotRecordable."""
        steps = followed = RecordedSteps(self._decode, self._choose_greedily, most_bytes)
        if self._device_drafter is not None:
            followed = RecordedSteps(partial(self._decode, follows=True), self._choose_greedily, most_bytes)
        followed.try_one(self.state.padding_slot)
        self._recorded, self._followed = steps, followed
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

    @property
    def is_done(self) -> bool:
        """Whether the oldest launched step is done."""
        return self._launched[0].done.passed

    def collect(self) -> StepResult:
        launched = self._launched.popleft()
        self._read(launched.number + 1)
        return launched.result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        drafts = self._look_up(plan)
        self._place(plan)
        if self._device_drafter is not None:
            drafts = self._draft(plan, self._device_drafter)
        step = StepArrays.of(plan.sequences, None if drafts is None else drafts.counts)
        rows = self._rows(plan.step, step, drafts)
        prompt_rows = self._prompt_rows(step) if self._prompt_logprobs else {}
        outcome = self._replay_or_run(step, rows, prompt_rows, self._follows(plan, step))
        launched = LaunchedStep(
            number=plan.step,
            step=step,
            rows=rows,
            owners_N=self._slots.owners[rows.slots_N],
            sampled=None if outcome.sampled is None else on_host(outcome.sampled),
            num_logprobs=self._sampler.num_logprobs(rows.slots_N),
            prompts=outcome.prompts,
            errors=self._rules.errors([s.slot for s in plan.sequences]),
            rank_error=self._rank_error(),
            done=Mark(self.device),
        )
        self._rules.sampled(rows, partial(self._tokens_of, launched))
        self._launched.append(launched)
        if self.max_drafts:
            self._unread.append(launched)

    def _look_up(self, plan: StepPlan) -> Drafts | None:
        """Waits for the tokens of the step before, if this one may have drafts. Nothing is placed yet."""
        drafter = self._drafter
        if drafter is None or not any(sequence.num_drafts for sequence in plan.sequences):
            return None
        self._read(plan.step)
        drafting = [sequence for sequence in plan.sequences if sequence.num_drafts]
        forced = self._rules.forced([s.slot for s in drafting], [s.num_drafts for s in drafting])
        found = {s.slot: drafter.propose(s.slot, s.num_drafts, ids) for s, ids in zip(drafting, forced, strict=True)}
        if not any(found.values()):
            return None
        self.state.put_drafts([(slot, ids) for slot, ids in found.items() if ids])
        drafts = [found.get(sequence.slot, []) for sequence in plan.sequences]
        return Drafts(
            [*map(len, drafts)], cache(lambda: np.array([id for ids in drafts for id in (0, *ids)], np.int64))
        )

    def _draft(self, plan: StepPlan, drafter: DeviceDrafter) -> Drafts | None:
        """Does not wait. Pages are placed. A sequence has no drafts in the first step after plain ones."""
        if not any(sequence.num_drafts for sequence in plan.sequences):
            return None
        counts = [0 if self._is_behind[sequence.slot] else sequence.num_drafts for sequence in plan.sequences]
        if not any(counts):
            return None
        slots_D = np.array([s.slot for s, count in zip(plan.sequences, counts, strict=True) if count], np.int64)
        last_places_D = self._slots.num_pages[slots_D] * self.memory.page_size - 1
        drafter.draft(slots_D, np.array([count for count in counts if count], np.int64), last_places_D)
        told = download(self.state.drafts[:, : max(counts)])
        made = Mark(self.device)

        def ids() -> IntArray:
            made.wait()
            found = [(0, *told[s.slot, :n].tolist()) for s, n in zip(plan.sequences, counts, strict=True)]
            return np.array([id for ids in found for id in ids], np.int64)

        return Drafts(counts, cache(ids))

    def _follows(self, plan: StepPlan, step: StepArrays) -> bool:
        """Whether the step also fills the head's layer: unless all its sequences decode and none may have drafts."""
        if self._device_drafter is None:
            return False
        decodes = not plan.new and step.num_decodes == len(step.slots_S)
        follows = not decodes or any(sequence.num_drafts for sequence in plan.sequences)
        self._is_behind[step.slots_S] = not follows
        return follows

    def _rows(self, number: int, step: StepArrays, drafts: Drafts | None) -> Rows:
        slots_N, places_N = step.slots_S[step.samples_S], step.places_S[step.samples_S]
        if not self.max_drafts:
            ends_N = step.ends_S[step.samples_S]
            return Rows(slots_N, places_N, lambda: ends_N, lambda: places_N)

        def positions() -> IntArray:
            self._read(number)
            found_N: IntArray = self._slots.num_known[slots_N] + places_N
            return found_N

        def ids() -> IntArray:
            found_N: IntArray = places_N if drafts is None else drafts.ids()[step.samples_S]
            return found_N

        return Rows(slots_N, places_N, cache(positions), ids)

    def _read(self, end: int) -> None:
        """Counts the tokens of launched steps with numbers below `end`, in order. Waits for them."""
        while self._unread and self._unread[0].number < end:
            launched = self._unread.popleft()
            rows, ids_N = launched.rows, launched.token_ids()
            rows.positions()  # from now on unknown but for the cache
            is_new_N = (ids_N >= 0) & (launched.owners_N == self._slots.owners[rows.slots_N])
            slots = rows.slots_N[is_new_N].tolist()
            by_slot: dict[int, list[int]] = {}
            for slot, token in zip(slots, ids_N[is_new_N].tolist(), strict=True):
                by_slot.setdefault(slot, []).append(token)
            for slot, tokens in by_slot.items():
                self._slots.num_known[slot] += len(tokens)
                if self._drafter is not None:
                    self._drafter.append(slot, tokens)

    def _tokens_of(self, launched: LaunchedStep) -> IntArray:
        self._read(launched.number + 1)
        return launched.token_ids()

    @torch.inference_mode()
    def take_part(self) -> None:
        """Runs a step without sequences, if other ranks have begun one: their tokens need the experts of this one."""
        if self.lockstep is None or not self.lockstep.is_awaited:
            return
        step = StepArrays.of_padding(self.state.padding_slot)
        size = self._graph_size(step, self._recorded, suits=self._recorded.fits_padding)
        if size is None:
            self._run(step, self._rows(0, step, None), {}, follows=False)
        else:
            self._recorded.replay(self._pack_padded(step.padded(size)))

    def _replay_or_run(self, step: StepArrays, rows: Rows, prompt_rows: dict[int, IntArray], follows: bool) -> Outcome:
        graphs = self._followed if follows else self._recorded
        size = self._graph_size(step, graphs, suits=not prompt_rows and graphs.fits(step))
        if size is not None:
            return self._replay(step, rows, graphs, size)
        size = None if prompt_rows else self.prompt_graphs.size_of(step)
        if size is not None:
            computed = self.prompt_graphs.replay(step, self._slots, size)
            return Outcome(self._end(step, rows, computed if follows else computed._replace(features_TH=None)), {})
        return self._run(step, rows, prompt_rows, follows)

    def _graph_size(self, step: StepArrays, graphs: DecodeGraphs | RecordedSteps, suits: bool) -> int | None:
        """The size of the CUDA graph that runs the step; None: it runs eagerly. All ranks decide the same."""
        num_tokens = step.num_tokens
        if self.lockstep is not None:
            tokens_by_rank, suits = self.lockstep.begin(num_tokens, suits)
            num_tokens = max(tokens_by_rank)
        size = graphs.size_of(num_tokens) if suits else None
        if size is not None and self.lockstep is not None:
            self.lockstep.pad(size)
        return size

    def _rank_error(self) -> Tensor | None:
        failed = None if self.lockstep is None else self.lockstep.exchange.failed
        return None if failed is None else download(failed)

    def _finish_texts(self, drafter: HostDrafter, new: list[NewSequence]) -> None:
        """Gives the drafter the last tokens of the sequences that had these slots. Waits for steps that compute them.

        Ranks collect their steps at different times, but must have the same drafts.
        """
        slots = {sequence.slot for sequence in new if drafter.keeps(sequence.slot)}
        ends = [step.number + 1 for step in self._unread if not slots.isdisjoint(step.rows.slots_N.tolist())]
        self._read(max(ends, default=0))

    def _place(self, plan: StepPlan) -> None:
        entries: PageEntries = [[] for _ in range(2 + len(self._kv))]
        if plan.new and self._drafter is not None:
            self._finish_texts(self._drafter, plan.new)
        for new in plan.new:
            self._slots.assign(new, entries)
            self._sampler.assign(new)
            self._rules.assign(new)
            if self._device_drafter is not None:
                self._device_drafter.assign(new)
            if self._drafter is not None:
                self._drafter.assign(new)
            self._prompt_logprobs.pop(new.slot, None)
            if new.sampling.prompt_logprobs is not None:
                self._prompt_logprobs[new.slot] = new.sampling.prompt_logprobs
        for sequence in plan.sequences:
            self._slots.extend(sequence, entries)
        self.state.update_pages(entries)

    def _run(self, step: StepArrays, rows: Rows, prompt_rows: dict[int, IntArray], follows: bool) -> Outcome:
        wanted_N = np.concatenate((step.sampled_rows, *prompt_rows.values()))
        flat, sizes = pack(step, self._slots, wanted_N, rows.slots_N)
        packed, count = PackedStep.of(upload(flat, self.device), sizes), sizes.sampled
        batch = self.state.batch(packed, step.num_decodes)
        x_NH, features_TH = self._hidden(batch, follows)
        sampled = self._end(step, rows, Computed(packed, batch, x_NH[:count], features_TH))
        return Outcome(sampled, self._of_prompts(step, prompt_rows, x_NH[count:]))

    def _end(self, step: StepArrays, rows: Rows, computed: Computed) -> Sampled | None:
        """Samples, if the step does, and lets a draft head follow."""
        packed, batch, x_NH, features_TH = computed
        sampled = self._sample(computed, rows, self._ruled(rows)) if len(x_NH) else None
        if self._device_drafter is not None and features_TH is not None:
            ids_M = None if sampled is None else sampled.token_ids_N
            self._device_drafter.follow_any(packed, batch, features_TH, ids_M, self._known_next(step))
        return sampled

    def _replay(self, step: StepArrays, rows: Rows, graphs: DecodeGraphs | RecordedSteps, size: int) -> Outcome:
        count = len(step.slots_S)
        computed = graphs.replay(self._pack_padded(step if size == count else step.padded(size)))
        ruled = self._ruled(rows)
        if ruled is None and self._sampler.wants_argmax(step.slots_S):
            return Outcome(Sampled(graphs.replay_choice(size)[:count]), {})
        sampled = self._sample(computed._replace(x_NH=computed.x_NH[:count]), rows, ruled)
        self._follow(computed, sampled.token_ids_N)
        return Outcome(sampled, {})

    def _pack_padded(self, padded: StepArrays) -> tuple[ColumnArray, PackedSizes]:
        sampled_slots_M = np.where(padded.samples_S, padded.slots_S, self.state.padding_slot)
        return pack(padded, self._slots, np.arange(len(padded.slots_S)), sampled_slots_M)

    def _sample(self, computed: Computed, rows: Rows, ruled: AllowedTokens | Few | None) -> Sampled:
        """A token per row of what the head takes, and whether it is accepted."""
        packed, batch, x_NH, _ = computed
        count = len(x_NH)

        def of_rows(column_T: Tensor) -> Tensor:
            return column_T[:count] if batch.logits_rows_N is None else column_T[batch.logits_rows_N[:count]]

        allowed = ruled if isinstance(ruled, AllowedTokens) else None
        can_choose = allowed is None or self._model.ops.chooser.restricts
        if not (can_choose and self._sampler.is_plain(rows.slots_N)):
            assert not isinstance(ruled, Few)
            columns = of_rows(batch.token_ids_T), of_rows(batch.positions_T) + 1
            sampled = self._sampler.sample(lambda part: self._model.head(x_NH[part]), rows, *columns, allowed)
        else:
            plain = self._sampler.plain(rows.slots_N, lambda: of_rows(batch.positions_T) + 1, allowed)
            sampled = Sampled(self._choose(x_NH, plain))
            if isinstance(ruled, Few):
                ids_N = self._sampler.narrowed(sampled.token_ids_N, x_NH, self._model.choose_few, rows, ruled)
                sampled = Sampled(ids_N)
        accepted_N = self.state.accept(packed, batch, sampled.token_ids_N)
        self._sampler.count(rows.slots_N, accepted_N)
        return sampled._replace(token_ids_N=accepted_N)

    def _ruled(self, rows: Rows) -> AllowedTokens | Few | None:
        """The tokens that the rules allow, on the device.

        Waits for the tokens of the step before this one. So call it after this step's work is queued on the device.
        """
        allowed = self._rules.allowed(rows, self._sampler.is_plain)
        if isinstance(allowed, Masks):
            return AllowedTokens(send(allowed.masks_KW, self.device), allowed.row_N)
        return allowed

    def _decode(self, packed: PackedStep[Tensor], follows: bool = False) -> Computed:
        """The first CUDA graph: one token per sequence, up to the input of the head. `follows`: as in `_follows`."""
        if self.lockstep is not None:
            self.lockstep.pad(len(packed.slots_S))
        batch = self.state.batch(packed, len(packed.slots_S), all_rows=True)
        return Computed(packed, batch, *self._hidden(batch, follows))

    def _compute(self, packed: PackedStep[Tensor]) -> Computed:
        """A CUDA graph of prompts: any step, up to the input of the head."""
        batch = self.state.batch(packed, num_decodes=0)
        return Computed(packed, batch, *self._hidden(batch, follows=True))

    def _choose_greedily(self, computed: Computed) -> Tensor:
        """The second CUDA graph: chooses the most probable tokens and keeps them."""
        packed, batch, x_NH, _ = computed
        ids_N = self.state.accept(packed, batch, self._choose(x_NH, self._sampler.greedy(len(x_NH))))
        self._follow(computed, ids_N)
        return ids_N

    def _choose(self, x_NH: Tensor, plain: SamplingBatch) -> Tensor:
        """Token ids [N] of plain rows."""
        if len(x_NH) <= LOGITS_AT_ONCE:
            return self._model.choose(x_NH, plain)
        parts = (slice(start, start + LOGITS_AT_ONCE) for start in range(0, len(x_NH), LOGITS_AT_ONCE))
        return torch.cat([self._model.choose(x_NH[part], plain.of_rows(part)) for part in parts])

    def _hidden(self, batch: Batch, follows: bool) -> tuple[Tensor, Tensor | None]:
        """The input of the head [N, H], and what a draft head reads [T, H]."""
        if self._device_drafter is None or not follows:
            return self._model.hidden(batch, self._kv), None
        x_NH, streams = self._model.hidden_and_streams(batch, self._kv, self._device_drafter.taps)
        return x_NH, self._device_drafter.features(streams)

    def _follow(self, computed: Computed, ids_M: Tensor) -> None:
        """After a step of one sampled token per row."""
        if self._device_drafter is not None and computed.features_TH is not None:
            self._device_drafter.follow(computed.packed, computed.batch, computed.features_TH, ids_M)

    def _known_next(self, step: StepArrays) -> ColumnArray:
        """[S]: the token after each sequence of the step, where the host knows it; else 0."""
        known_S = np.zeros(len(step.slots_S), np.int32)
        for i in (step.ends_S < self._slots.num_given[step.slots_S]).nonzero()[0].tolist():
            end = int(step.ends_S[i])
            known_S[i] = self._slots.given(int(step.slots_S[i]), end, end + 1)[0]
        return known_S

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
