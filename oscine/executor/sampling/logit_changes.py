"""Changes to the logits of sequences before sampling: biases, and penalties on earlier tokens.

Histories exist only for sequences with penalties.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oscine.executor.batch.copies import upload, upload_columns
from oscine.executor.batch.slots import IntArray, Rows
from oscine.types import NewSequence, SamplingParams


@dataclass(frozen=True, slots=True)
class PenaltyState:
    """The tokens of one sequence with penalties, on the device."""

    output_counts_V: Tensor  # int32
    prompt_mask_V: Tensor  # bool


@dataclass(frozen=True, slots=True)
class Bias:
    """Values added to the logits of one sequence; -inf forbids."""

    values: dict[int, float]  # by token id
    stop_token_ids: list[int]  # forbidden before min_end
    min_end: int  # position


class LogitChanges:
    """The biases and penalties of all slots."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self.slots: set[int] = set()  # of sequences with a bias or penalties
        self._biases: dict[int, Bias] = {}  # by slot
        self._histories: dict[int, PenaltyState] = {}  # by slot
        self._penalties = np.zeros((3, num_slots), np.float32)  # presence, frequency, repetition

    def assign(self, new: NewSequence) -> None:
        slot, sampling = new.slot, new.sampling
        self._biases.pop(slot, None)
        self._histories.pop(slot, None)
        if sampling.logit_bias or (sampling.min_tokens and sampling.grammar is None):  # which knows when it must end
            self._biases[slot] = self._bias(sampling, new.num_prompt_tokens)
        penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
        self._penalties[:, slot] = penalties
        if penalties != (0, 0, 1):
            self._histories[slot] = self._history(new)
        self.slots = {*self._biases, *self._histories}

    def count(self, slots_N: IntArray, token_ids_N: Tensor) -> None:
        """Adds tokens to the histories; negative ids are none."""
        if not self._histories:
            return
        for row, slot in enumerate(slots_N.tolist()):
            if slot in self._histories:
                id_1 = token_ids_N[row : row + 1].long()
                self._histories[slot].output_counts_V.scatter_add_(0, id_1.clamp(min=0), (id_1 >= 0).int())

    def fields(self, rows: Rows, part: slice, token_ids_N: Tensor) -> dict[str, Tensor]:
        """The fields of SamplingBatch for the rows in `part`. `token_ids_N`: the input tokens of all rows."""
        slots = rows.slots_N[part].tolist()
        if self.slots.isdisjoint(slots):
            return {}
        return self._bias_fields(slots, rows, part) | self._penalty_fields(slots, rows, part, token_ids_N)

    def _bias_fields(self, slots: list[int], rows: Rows, part: slice) -> dict[str, Tensor]:
        entries: list[tuple[int, int, float]] = []
        if not self._biases.keys().isdisjoint(slots):
            for row, (slot, position) in enumerate(zip(slots, rows.positions()[part].tolist(), strict=True)):
                bias = self._biases.get(slot)
                if bias is None:
                    continue
                entries += [(row, i, value) for i, value in bias.values.items()]
                if position < bias.min_end:
                    entries += [(row, i, -torch.inf) for i in bias.stop_token_ids]
        if not entries:
            return {}
        numbers, ids, values = zip(*entries, strict=True)
        return {
            "bias_rows": upload(np.array(numbers, np.int64), self._device),
            "bias_ids": upload(np.array(ids, np.int64), self._device),
            "bias_values": upload(np.array(values, np.float32), self._device),
        }

    def _penalty_fields(self, slots: list[int], rows: Rows, part: slice, token_ids_N: Tensor) -> dict[str, Tensor]:
        """The drafts that a row comes after count as generated."""
        if self._histories.keys().isdisjoint(slots):
            return {}
        shape = (len(slots), self._vocab_size)
        counts_NV = torch.zeros(shape, dtype=torch.int32, device=self._device)
        prompt_NV = torch.zeros(shape, dtype=torch.bool, device=self._device)
        for row, (slot, place) in enumerate(zip(slots, rows.places_N[part].tolist(), strict=True)):
            history = self._histories.get(slot)
            if history is not None:
                counts_NV[row], prompt_NV[row] = history.output_counts_V, history.prompt_mask_V
                end = part.start + row + 1
                drafts = token_ids_N[end - place : end].long()
                counts_NV[row].scatter_add_(0, drafts, torch.ones_like(drafts, dtype=torch.int32))
        presence_N, frequency_N, repetition_N = upload_columns(self._penalties[:, slots], self._device)
        return {
            "presence_N": presence_N,
            "frequency_N": frequency_N,
            "repetition_N": repetition_N,
            "output_counts_NV": counts_NV,
            "prompt_mask_NV": prompt_NV,
        }

    def _bias(self, sampling: SamplingParams, num_prompt_tokens: int) -> Bias:
        # Harmony defines an id past the embedding: it cannot be sampled, so it needs no mask.
        stops = [i for i in sampling.stop_token_ids if i < self._vocab_size and sampling.grammar is None]
        return Bias(sampling.logit_bias, stops, num_prompt_tokens + sampling.min_tokens)

    def _history(self, new: NewSequence) -> PenaltyState:
        prompt, generated = new.token_ids[: new.num_prompt_tokens], new.token_ids[new.num_prompt_tokens :]
        counts = np.bincount(np.array(generated, np.int64), minlength=self._vocab_size).astype(np.int32)
        mask = np.zeros(self._vocab_size, np.bool_)
        mask[prompt] = True
        return PenaltyState(upload(counts, self._device), upload(mask, self._device))
