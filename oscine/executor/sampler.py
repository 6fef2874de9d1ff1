"""Sampling parameters of the running sequences, and what a step samples with them.

Knows which rows need what, so that a row pays only for what it asks: greedy rows cost a gather of eight numbers, and
histories exist only for sequences with penalties. The arithmetic itself is an op. Suffixes as in ops/interface.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oscine.executor.logprobs import records
from oscine.executor.slots import IntArray
from oscine.ops.interface import Sampled, SamplingBatch
from oscine.types import NewSequence, SamplingParams, TokenLogprobs

_DTYPES: dict[str, type[np.generic]] = {
    "temperature": np.float32,
    "top_k": np.int64,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.int64,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "repetition_penalty": np.float32,
}


@dataclass(frozen=True, slots=True)
class History:
    """The tokens of one sequence with penalties."""

    output_counts_V: Tensor  # int32
    prompt_mask_V: Tensor  # bool


@dataclass(frozen=True, slots=True)
class Bias:
    """What is added to the logits of one sequence; -inf forbids."""

    token_ids: list[int]
    values: list[float]
    stop_token_ids: list[int]  # forbidden before min_end
    min_end: int  # position


class Sampler:
    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device, sample: Callable[[Tensor, SamplingBatch], Sampled]
    ) -> None:
        self._vocab_size, self._device, self._sample = vocab_size, device, sample
        self._values: dict[str, NDArray[np.generic]] = {name: np.zeros(num_slots, d) for name, d in _DTYPES.items()}
        self._truncated = np.zeros(num_slots, np.bool_)
        self._num_logprobs = np.zeros(num_slots, np.int64)  # -1: none
        self._biases: dict[int, Bias] = {}  # by slot
        self._histories: dict[int, History] = {}  # by slot

    def place(self, new: NewSequence) -> None:
        slot, sampling = new.slot, new.sampling
        for name, column in self._values.items():
            column[slot] = getattr(sampling, name)
        shortens = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self._truncated[slot] = shortens and sampling.temperature > 0
        self._num_logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        self._biases.pop(slot, None)
        self._histories.pop(slot, None)
        if sampling.logit_bias or sampling.min_tokens:
            self._biases[slot] = self._bias(sampling, new.num_prompt_tokens)
        if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1:
            self._histories[slot] = self._history(new)

    def sample(
        self, logits_NV: Tensor, slots_N: IntArray, positions_N: IntArray
    ) -> tuple[list[int], list[list[TokenLogprobs] | None] | None]:
        """One token a row, to stand at the given position of its slot; log-probabilities where a row asked for them."""
        slots = slots_N.tolist()
        sampled = self._sample(logits_NV, self._batch(slots_N, slots, positions_N))
        token_ids: list[int] = sampled.token_ids_N.tolist()
        if self._histories:
            for slot, token_id in zip(slots, token_ids, strict=True):
                if slot in self._histories:
                    self._histories[slot].output_counts_V[token_id] += 1
        if sampled.logprobs_N is None:
            return token_ids, None
        wanted = self._num_logprobs[slots_N].tolist()
        found = records(sampled, wanted)
        return token_ids, [[r] if k >= 0 else None for r, k in zip(found, wanted, strict=True)]

    def _batch(self, slots_N: IntArray, slots: list[int], positions_N: IntArray) -> SamplingBatch:
        def column(name: str) -> Tensor:
            return torch.from_numpy(self._values[name][slots_N]).to(self._device, non_blocking=True)

        most_logprobs = int(self._num_logprobs[slots_N].max())
        return SamplingBatch(
            temperature_N=column("temperature"),
            top_k_N=column("top_k"),
            top_p_N=column("top_p"),
            min_p_N=column("min_p"),
            seed_N=column("seed"),
            position_N=torch.from_numpy(positions_N).to(self._device, non_blocking=True),
            greedy=not self._values["temperature"][slots_N].any(),
            truncated=bool(self._truncated[slots_N].any()),
            num_logprobs=most_logprobs if most_logprobs >= 0 else None,
            **self._bias_fields(slots, positions_N),
            **self._penalty_fields(slots, column),
        )

    def _bias_fields(self, slots: list[int], positions_N: IntArray) -> dict[str, Tensor]:
        entries: list[tuple[int, int, float]] = []
        if self._biases:
            for row, (slot, position) in enumerate(zip(slots, positions_N.tolist(), strict=True)):
                bias = self._biases.get(slot)
                if bias is None:
                    continue
                entries += [(row, i, value) for i, value in zip(bias.token_ids, bias.values, strict=True)]
                if position < bias.min_end:
                    entries += [(row, i, -torch.inf) for i in bias.stop_token_ids]
        if not entries:
            return {}
        rows, ids, values = zip(*entries, strict=True)
        return {
            "bias_rows": torch.tensor(rows, device=self._device),
            "bias_ids": torch.tensor(ids, device=self._device),
            "bias_values": torch.tensor(values, dtype=torch.float32, device=self._device),
        }

    def _penalty_fields(self, slots: list[int], column: Callable[[str], Tensor]) -> dict[str, Tensor]:
        if not any(slot in self._histories for slot in slots):
            return {}
        shape = (len(slots), self._vocab_size)
        counts_NV = torch.zeros(shape, dtype=torch.int32, device=self._device)
        prompt_NV = torch.zeros(shape, dtype=torch.bool, device=self._device)
        for row, slot in enumerate(slots):
            history = self._histories.get(slot)
            if history is not None:
                counts_NV[row], prompt_NV[row] = history.output_counts_V, history.prompt_mask_V
        return {
            "presence_N": column("presence_penalty"),
            "frequency_N": column("frequency_penalty"),
            "repetition_N": column("repetition_penalty"),
            "output_counts_NV": counts_NV,
            "prompt_mask_NV": prompt_NV,
        }

    def _bias(self, sampling: SamplingParams, num_prompt_tokens: int) -> Bias:
        # Harmony defines an id past the embedding: it cannot be sampled, so it needs no mask.
        stops = [i for i in sampling.stop_token_ids if i < self._vocab_size]
        ids, values = list(sampling.logit_bias), list(sampling.logit_bias.values())
        return Bias(ids, values, stops, num_prompt_tokens + sampling.min_tokens)

    def _history(self, new: NewSequence) -> History:
        prompt, generated = new.token_ids[: new.num_prompt_tokens], new.token_ids[new.num_prompt_tokens :]
        counts = np.bincount(np.array(generated, np.int64), minlength=self._vocab_size).astype(np.int32)
        mask = np.zeros(self._vocab_size, np.bool_)
        mask[prompt] = True
        return History(torch.from_numpy(counts).to(self._device), torch.from_numpy(mask).to(self._device))
