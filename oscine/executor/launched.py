"""A launched step: its outputs on the way from the device, and the result once they have arrived."""

from dataclasses import dataclass

from torch import Tensor

from oscine.executor.logprobs import records
from oscine.executor.slots import IntArray
from oscine.executor.step_batch import BoolArray
from oscine.executor.transfer import Mark
from oscine.ops.interface import Sampled
from oscine.types import NON_FINITE, RankLostError, StepResult, TokenLogprobs


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Tokens of a prompt with their log-probabilities."""

    tokens: Sampled  # on the host
    num_top: int


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """All tensors are on the host and may be read once `done` has passed."""

    step: int
    slots_S: IntArray
    samples_S: BoolArray
    sampled: Sampled | None  # on the host, a row for each true element of samples_S; None where there is none
    num_logprobs: list[int]  # per sampled row; -1: none
    prompts: dict[int, PromptRows]  # slot -> its tokens in this step
    errors: dict[int, str]  # slot -> why its sequence cannot go on
    done: Mark
    rank_error: Tensor | None = None  # on the host, not zero if another rank did not come in time on the device

    def token_ids(self) -> list[int]:
        """The ids of the sampled rows. Waits."""
        self.done.wait()
        ids: list[int] = [] if self.sampled is None else self.sampled.token_ids_N.tolist()
        return ids

    def result(self) -> StepResult:
        """Waits."""
        ids = self.token_ids()
        if self.rank_error is not None and self.rank_error.item():
            raise RankLostError("another rank of the group did not come in time")
        prompts = {
            slot: records(rows.tokens, [rows.num_top] * len(rows.tokens.token_ids_N))
            for slot, rows in self.prompts.items()
        }
        indices = self.samples_S.nonzero()[0].tolist()
        errors = self.errors | {int(self.slots_S[i]): NON_FINITE for i, id in zip(indices, ids, strict=True) if id < 0}
        result = StepResult(self.step, [[] for _ in self.samples_S], None, prompts or None, errors or None)
        if self.sampled is None:
            return result
        for i, token_id in zip(indices, ids, strict=True):
            result.token_ids[i] = [token_id]
        if self.sampled.logprobs_N is not None:
            logprobs: list[list[TokenLogprobs] | None] = [None] * len(self.samples_S)
            for i, record, k in zip(indices, records(self.sampled, self.num_logprobs), self.num_logprobs, strict=True):
                logprobs[i] = [record] if k >= 0 else None
            result.logprobs = logprobs
        return result
