"""The choice of the next tokens: what grammars allow, what sampling says, and what the device keeps of it."""

import torch
from torch import Tensor

from oscine.executor.batch.copies import send
from oscine.executor.batch.device_state import Computed, DeviceState
from oscine.executor.batch.slots import IntArray, Rows
from oscine.executor.kv.memory import LOGITS_AT_ONCE
from oscine.executor.sampling.headers import CandidateSet
from oscine.executor.sampling.rules import Masks, NewRules
from oscine.executor.sampling.sampler import AllowedTokens, Sampler
from oscine.model.gpt_oss import GptOss
from oscine.ops.interface import Sampled, SamplingBatch
from oscine.types import NewSequence


class Choice:
    def __init__(self, model: GptOss, state: DeviceState, max_num_seqs: int, new_rules: NewRules) -> None:
        self._model, self._state = model, state
        self._sampler = Sampler(max_num_seqs, model.config.vocab_size, state.device, model.ops.sample)
        self.rules = new_rules(max_num_seqs, state.device)

    def assign(self, new: NewSequence) -> None:
        """A sequence takes a slot."""
        self._sampler.assign(new)
        self.rules.assign(new)

    def num_logprobs(self, slots_N: IntArray) -> list[int]:
        """As of Sampler."""
        return self._sampler.num_logprobs(slots_N)

    def is_greedy(self, slots_S: IntArray) -> bool:
        """Whether `greedily` chooses for all of them, unless a grammar has a say."""
        return self._sampler.wants_argmax(slots_S)

    def ruled(self, rows: Rows) -> AllowedTokens | CandidateSet | None:
        """The tokens that the rules allow, on the device.

        Waits for the tokens of the step before this one. So call it after this step's work is queued on the device.
        """
        allowed = self.rules.allowed(rows, self._sampler.is_plain)
        if isinstance(allowed, Masks):
            return AllowedTokens(send(allowed.masks_KW, self._state.device), allowed.row_N)
        return allowed

    def sample(self, computed: Computed, rows: Rows, ruled: AllowedTokens | CandidateSet | None) -> Sampled:
        """A token per row of what the head takes, and whether it is accepted."""
        packed, batch, x_NH, _ = computed
        count = len(x_NH)

        def of_rows(column_T: Tensor) -> Tensor:
            return column_T[:count] if batch.logits_rows_N is None else column_T[batch.logits_rows_N[:count]]

        allowed = ruled if isinstance(ruled, AllowedTokens) else None
        can_choose = allowed is None or self._model.ops.chooser.restricts
        if not (can_choose and self._sampler.is_plain(rows.slots_N)):
            assert not isinstance(ruled, CandidateSet)
            columns = of_rows(batch.token_ids_T), of_rows(batch.positions_T) + 1
            sampled = self._sampler.sample(lambda part: self._model.head(x_NH[part]), rows, *columns, allowed)
        else:
            plain = self._sampler.plain(rows.slots_N, lambda: of_rows(batch.positions_T) + 1, allowed)
            sampled = Sampled(self._choose(x_NH, plain))
            if isinstance(ruled, CandidateSet):
                ids_N = self._sampler.narrowed(sampled.token_ids_N, x_NH, self._model.choose_few, rows, ruled)
                sampled = Sampled(ids_N)
        accepted_N = self._state.accept(packed, batch, sampled.token_ids_N)
        self._sampler.count(rows.slots_N, accepted_N)
        return sampled._replace(token_ids_N=accepted_N)

    def greedily(self, computed: Computed) -> Tensor:
        """The most probable tokens [N], which the device keeps: a CUDA graph."""
        plain = self._sampler.greedy(len(computed.x_NH))
        return self._state.accept(computed.packed, computed.batch, self._choose(computed.x_NH, plain))

    def _choose(self, x_NH: Tensor, plain: SamplingBatch) -> Tensor:
        """Token ids [N] of plain rows."""
        if len(x_NH) <= LOGITS_AT_ONCE:
            return self._model.choose(x_NH, plain)
        parts = (slice(start, start + LOGITS_AT_ONCE) for start in range(0, len(x_NH), LOGITS_AT_ONCE))
        return torch.cat([self._model.choose(x_NH[part], plain.of_rows(part)) for part in parts])
