"""Conversations as rows of tokens: whole documents side by side, with a loss weight for every token."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.tokenizer import Tokenizer
from training.conversations import Sample, sample
from training.split import Draw

PROMPT_WEIGHT = 0.05  # small, but above 0, so that the words of questions get good embeddings
_REMEMBERED = 400  # characters
_WAITING = 24  # documents to choose from when a row has little space left


class Row(NamedTuple):
    ids: np.ndarray  # int64 [T + 1]
    starts: np.ndarray  # int32 [T]: where the document of each position starts
    weights: np.ndarray  # float32 [T]: loss weight of predicting ids[1:]


class _Remembering(Tokenizer):
    """Caches the ids of short texts: names of roles and channels, system messages."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._remembered = lru_cache(1 << 14)(super().encode)

    def encode(self, text: str) -> list[int]:
        return self._remembered(text) if len(text) < _REMEMBERED else super().encode(text)


class Encoder:
    """Turns samples into documents."""

    def __init__(self, folder: str | Path) -> None:
        self.tokenizer = _Remembering(folder)
        self.renderer = HarmonyRenderer(self.tokenizer)
        self._assistant = self.tokenizer.encode("assistant")
        self._final = [self.tokenizer.channel, *self.tokenizer.encode("final"), self.tokenizer.message]

    def prompt(self, made: Sample) -> list[int]:
        return self.renderer.render(made.conversation)

    def document(self, made: Sample) -> tuple[list[int], list[float]]:
        """The tokens of prompt and completion, and their weights."""
        prompt = self.prompt(made)
        completion = self.renderer.render_completion(made.completion)
        unlearnt = 0
        if made.forced:
            unlearnt = len(completion) - completion[::-1].index(self.tokenizer.message)
        weights = [0.0] * unlearnt + [1.0] * (len(completion) - unlearnt)
        return prompt + completion, self._prompt_weights(prompt, made.context_weight) + weights

    def _prompt_weights(self, prompt: list[int], context_weight: float) -> list[float]:
        """Zero within the assistant's turns: they lack their reasoning and end in <|end|>, so they must not be
        imitated.

        Only the text of its earlier final messages counts, with `context_weight`.
        """
        weights = [PROMPT_WEIGHT] * len(prompt)
        starts = [i for i, token in enumerate(prompt) if token == self.tokenizer.start]
        for start, stop in zip(starts, [*starts[1:], len(prompt)], strict=True):
            header = start + 1 + len(self._assistant)
            if prompt[start + 1 : header] != self._assistant:
                continue
            weights[header:stop] = [0.0] * (stop - header)
            text = header + len(self._final)
            if context_weight and prompt[header:text] == self._final:
                weights[text : stop - 1] = [context_weight] * (stop - 1 - text)
        return weights


class PackedRows(IterableDataset):  # type: ignore[type-arg]
    """Endless rows of T positions; each worker has its own seed, so that a run is repeatable."""

    def __init__(self, folder: str | Path, length: int, seed: int) -> None:
        self.folder, self.length, self.seed = folder, length, seed

    def __iter__(self) -> Iterator[Row]:
        worker = get_worker_info()
        number = worker.id if worker else 0
        encoder, draw = Encoder(self.folder), Draw(self.seed * 1000 + number + 1)
        waiting: list[tuple[list[int], list[float]]] = []
        while True:
            yield self._row(encoder, draw, waiting)

    def _row(self, encoder: Encoder, draw: Draw, waiting: list[tuple[list[int], list[float]]]) -> Row:
        size = self.length + 1
        ids = np.full(size, encoder.tokenizer.endoftext, np.int64)
        starts, weights = np.zeros(size, np.int32), np.zeros(size, np.float32)
        filled = 0
        while True:
            while len(waiting) < _WAITING:
                document = encoder.document(sample(draw))
                if len(document[0]) <= size:
                    waiting.append(document)
            fitting = next((i for i, (tokens, _) in enumerate(waiting) if filled + len(tokens) <= size), None)
            if fitting is None:
                break
            tokens, token_weights = waiting.pop(fitting)
            end = filled + len(tokens)
            ids[filled:end], starts[filled:end], weights[filled:end] = tokens, filled, token_weights
            weights[filled] = 0.0  # nothing precedes it
            filled = end
        starts[filled:] = filled
        return Row(ids, starts[:-1], weights[1:])
