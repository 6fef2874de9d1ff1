"""Log-probabilities of the tokens of prompts, for sequences that ask for them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from oscine.executor.batch.slots import IntArray, Slots
from oscine.executor.batch.step_arrays import StepArrays
from oscine.executor.sampling.logprobs import of_tokens, on_host
from oscine.ops.interface import Sampled
from oscine.types import NewSequence


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Tokens of a prompt with their log-probabilities."""

    tokens: Sampled  # on the host
    num_top: int


class PromptLogprobs:
    def __init__(self, slots: Slots, head: Callable[[Tensor], Tensor]) -> None:
        """`head`: as GptOss.head."""
        self._slots, self._head = slots, head
        self._num_top: dict[int, int] = {}  # slot -> how many of the most probable tokens

    def assign(self, new: NewSequence) -> None:
        """A sequence takes a slot."""
        self._num_top.pop(new.slot, None)
        if new.sampling.prompt_logprobs is not None:
            self._num_top[new.slot] = new.sampling.prompt_logprobs

    def rows(self, step: StepArrays) -> dict[int, IntArray]:
        """Index of a sequence in the step -> rows of its tokens that are followed by another token of the prompt."""
        rows: dict[int, IntArray] = {}
        if not self._num_top:
            return rows
        for i, slot in enumerate(step.slots_S.tolist()):
            if slot in self._num_top:
                num_followed = min(step.ends_S[i], self._slots.num_prompt_tokens[slot] - 1) - step.starts_S[i]
                if num_followed > 0:
                    rows[i] = step.query_starts_S1[i] + np.arange(num_followed)
        return rows

    def of(self, step: StepArrays, rows: dict[int, IntArray], x_NH: Tensor) -> dict[int, PromptRows]:
        """By slot. x_NH: the head's input for all `rows`, in order."""
        found: dict[int, PromptRows] = {}
        if not rows:
            return found
        parts = x_NH.split_with_sizes([len(of_sequence) for of_sequence in rows.values()])
        for i, x_of_sequence in zip(rows, parts, strict=True):
            slot, start = int(step.slots_S[i]), int(step.starts_S[i]) + 1
            token_ids, num_top = self._slots.given(slot, start, start + len(x_of_sequence)), self._num_top[slot]
            found[slot] = PromptRows(on_host(of_tokens(self._head, x_of_sequence, token_ids, num_top)), num_top)
        return found
