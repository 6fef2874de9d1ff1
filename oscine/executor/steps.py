"""One step: as a CUDA graph, as a recorded call, or op by op. Then its tokens are chosen, and a draft head follows."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from oscine.executor.adapters import NoAdapters
from oscine.executor.batch.copies import upload
from oscine.executor.batch.device_state import Computed, DeviceState
from oscine.executor.batch.slots import ColumnArray, IntArray, Rows, Slots
from oscine.executor.batch.step_arrays import StepArrays, pack
from oscine.executor.cuda_graphs import DecodeGraphs
from oscine.executor.drafts import NoDrafts
from oscine.executor.forward import Forward
from oscine.executor.lockstep import OwnSteps
from oscine.executor.recorded_steps import RecordedSteps
from oscine.executor.sampling.choice import Choice
from oscine.executor.sampling.prompt_logprobs import PromptLogprobs, PromptRows
from oscine.executor.step_graphs import StepGraphs
from oscine.ops.interface import Sampled
from oscine.ops.packed import PackedSizes, PackedStep


class Outcome(NamedTuple):
    """The results of a step, still on the device."""

    sampled: Sampled | None  # on the device; a row for each sequence that samples
    prompts: dict[int, PromptRows]  # by slot


class Steps:
    def __init__(
        self,
        forward: Forward,
        choice: Choice,
        prompts: PromptLogprobs,
        drafts: NoDrafts,
        state: DeviceState,
        slots: Slots,
        lockstep: OwnSteps,
        adapters: NoAdapters,
    ) -> None:
        self._forward, self._choice, self._prompts, self._drafts = forward, choice, prompts, drafts
        self._state, self._slots, self._lockstep, self._adapters = state, slots, lockstep, adapters
        self.graphs = StepGraphs(forward, self._choose_greedily, state, has_head=bool(drafts.aux_layers))

    def run(self, step: StepArrays, rows: Rows, prompt_rows: dict[int, IntArray], follows: bool) -> Outcome:
        """`prompt_rows`: of PromptLogprobs. `follows`: a draft head does."""
        if self._adapters.are_used(step.slots_S):
            return self._run_adapted(step, rows, prompt_rows, follows)
        graphs = self.graphs.followed if follows else self.graphs.plain
        size = self._graph_size(step, graphs, suits=not prompt_rows and graphs.fits(step))
        if size is not None:
            return Outcome(self._replay(step, rows, graphs, size), {})
        size = None if prompt_rows else self.graphs.prompts.size_of(step)
        if size is not None:
            computed = self.graphs.prompts.replay(step, self._slots, size)
            return Outcome(self._end(step, rows, computed if follows else computed._replace(features_TH=None)), {})
        return self._run(step, rows, prompt_rows, follows)

    def _run_adapted(self, step: StepArrays, rows: Rows, prompt_rows: dict[int, IntArray], follows: bool) -> Outcome:
        """A step in which a sequence has an adapter."""
        graphs, prompts = self.graphs.adapted, self.graphs.adapted_prompts
        if not prompt_rows and follows == self.graphs.has_head and graphs.fits(step):
            return Outcome(self._replay(step, rows, graphs, graphs.size_of(len(step.slots_S))), {})
        size = None if prompt_rows else prompts.size_of(step)
        if size is None:
            return self._run(step, rows, prompt_rows, follows, adapted=True)
        computed = prompts.replay(step, self._slots, size)
        return Outcome(self._end(step, rows, computed if follows else computed._replace(features_TH=None)), {})

    def run_padding(self, step: StepArrays, rows: Rows) -> None:
        """A step of padding, that others may compute tokens by this rank's experts."""
        graphs = self.graphs.plain
        size = self._graph_size(step, graphs, suits=graphs.fits_padding)
        if size is None:
            self._run(step, rows, {}, follows=False)
        else:
            graphs.replay(self._pack_padded(step.padded(size)))

    def _graph_size(self, step: StepArrays, graphs: DecodeGraphs | RecordedSteps, suits: bool) -> int | None:
        """The size of the CUDA graph that runs the step; None: it runs eagerly. All ranks decide the same."""
        agreed = self._lockstep.begin(step.num_tokens, suits)
        if not agreed.replays:
            return None
        size = graphs.size_of(max(agreed.tokens))
        self._lockstep.pad(size)
        return size

    def _replay(self, step: StepArrays, rows: Rows, graphs: DecodeGraphs | RecordedSteps, size: int) -> Sampled:
        count = len(step.slots_S)
        computed = graphs.replay(self._pack_padded(step if size == count else step.padded(size)))
        ruled = self._choice.ruled(rows)
        if ruled is None and self._choice.is_greedy(step.slots_S):
            return Sampled(graphs.replay_choice(size)[:count])
        sampled = self._choice.sample(computed._replace(x_NH=computed.x_NH[:count]), rows, ruled)
        self._follow(computed, sampled.token_ids_N)
        return sampled

    def _run(
        self, step: StepArrays, rows: Rows, prompt_rows: dict[int, IntArray], follows: bool, *, adapted: bool = False
    ) -> Outcome:
        wanted_N = np.concatenate((step.sampled_rows, *prompt_rows.values()))
        flat, sizes = pack(step, self._slots, wanted_N, rows.slots_N)
        packed, count = PackedStep.of(upload(flat, self._state.device), sizes), sizes.sampled
        computed = self._forward.any(packed, step.num_decodes, follows=follows, adapted=adapted)
        sampled = self._end(step, rows, computed._replace(x_NH=computed.x_NH[:count]))
        return Outcome(sampled, self._prompts.of(step, prompt_rows, computed.x_NH[count:]))

    def _end(self, step: StepArrays, rows: Rows, computed: Computed) -> Sampled | None:
        """Samples, if the step does, and lets a draft head follow."""
        sampled = self._choice.sample(computed, rows, self._choice.ruled(rows)) if len(computed.x_NH) else None
        if computed.features_TH is not None:
            ids_M = None if sampled is None else sampled.token_ids_N
            self._drafts.follow_any(computed.packed, computed.batch, computed.features_TH, ids_M, step)
        return sampled

    def _pack_padded(self, padded: StepArrays) -> tuple[ColumnArray, PackedSizes]:
        sampled_slots_M = np.where(padded.samples_S, padded.slots_S, self._state.padding_slot)
        return pack(padded, self._slots, np.arange(len(padded.slots_S)), sampled_slots_M)

    def _choose_greedily(self, computed: Computed) -> Tensor:
        """The second CUDA graph of a decode: chooses the most probable tokens and keeps them."""
        ids_N = self._choice.greedily(computed)
        self._follow(computed, ids_N)
        return ids_N

    def _follow(self, computed: Computed, ids_M: Tensor) -> None:
        """After a step of one sampled token per row."""
        if computed.features_TH is not None:
            self._drafts.follow(computed.packed, computed.batch, computed.features_TH, ids_M)
