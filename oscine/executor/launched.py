"""A launched step: its outputs on the way from the device, and the result once they have arrived."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from oscine.executor.batch.copies import Mark
from oscine.executor.batch.slots import IntArray, Rows
from oscine.executor.batch.step_arrays import StepArrays
from oscine.executor.sampling.logprobs import records
from oscine.executor.sampling.prompt_logprobs import PromptRows
from oscine.ops.interface import Sampled
from oscine.ops.packed import REJECTED
from oscine.types import NON_FINITE, RankLostError, StepResult, TokenLogprobs


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """All tensors are on the host and may be read once `done` has passed."""

    number: int
    step: StepArrays
    rows: Rows
    owners_N: IntArray  # as Slots.owners
    sampled: Sampled | None  # on the host, a row for each true element of samples_S; None where there is none
    num_logprobs: list[int]  # per sampled row; -1: none
    prompts: dict[int, PromptRows]  # slot -> its tokens in this step
    errors: dict[int, str]  # slot -> why its sequence cannot go on
    done: Mark
    rank_error: Tensor | None = None  # on the host, not zero if another rank did not come in time on the device

    def token_ids(self) -> IntArray:
        """The ids of the sampled rows, as Ops.accept returns them. Waits."""
        self.done.wait()
        ids: IntArray = np.empty(0, np.int64) if self.sampled is None else self.sampled.token_ids_N.numpy()
        return ids

    def result(self) -> StepResult:
        """Waits."""
        ids = self.token_ids().tolist()
        if self.rank_error is not None and self.rank_error.item():
            raise RankLostError("another rank of the group did not come in time")
        prompts = {
            slot: records(rows.tokens, [rows.num_top] * len(rows.tokens.token_ids_N))
            for slot, rows in self.prompts.items()
        }
        step = self.step
        slots = step.slots_S[step.samples_S].tolist()
        errors = self.errors | {slot: NON_FINITE for slot, id in zip(slots, ids, strict=True) if id == -1}
        sequences_S = (step.places_S == 0).cumsum() - 1
        sequences = sequences_S[step.samples_S].tolist()
        token_ids: list[list[int]] = [[] for _ in range(int(sequences_S[-1]) + 1)]
        for sequence, token_id in zip(sequences, ids, strict=True):
            if token_id != REJECTED:
                token_ids[sequence].append(token_id)
        drafted = None
        if len(token_ids) < len(sequences_S):
            drafted = (np.bincount(sequences_S) - 1).tolist()
        logprobs = self._logprobs(sequences, ids, len(token_ids))
        return StepResult(self.number, token_ids, logprobs, prompts or None, errors or None, drafted)

    def _logprobs(self, sequences: list[int], ids: list[int], count: int) -> list[list[TokenLogprobs] | None] | None:
        """Per sequence of the plan."""
        if self.sampled is None or self.sampled.logprobs_N is None:
            return None
        found: list[list[TokenLogprobs] | None] = [None] * count
        told = zip(sequences, ids, records(self.sampled, self.num_logprobs), self.num_logprobs, strict=True)
        for sequence, token_id, record, k in told:
            if k >= 0 and token_id != REJECTED:
                found[sequence] = [*(found[sequence] or []), record]
        return found
