"""An executor that computes nothing: every sequence gets the same scripted reply, at a given pace.

For measuring and testing everything around the model. No torch. A step on the imagined device begins when it is
launched or when the step before it ends, so overlapped scheduling overlaps here as well. If a sequence has a grammar,
masks are made as for a model: once the step before has ended, while this step runs. The step then waits for them. A
scripted token that the grammar forbids is replaced by an allowed one.
"""

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from oscine.executor.batch.slots import ColumnArray, IntArray, Rows
from oscine.executor.kv.fake_memory import FakePages
from oscine.executor.sampling.masks import Constraints, GrammarCache
from oscine.model.tokenizer_file import library_errors, read_tokenizer
from oscine.timing.features import features_of
from oscine.timing.table import StepTable
from oscine.types import NewSequence, SamplingParams, StepPlan, StepResult, TokenLogprobs

REPLY = (
    "<|channel|>analysis<|message|>The user wants to hear something, so I say something."
    "<|end|><|start|>assistant<|channel|>final<|message|>"
)
TEXT = "Once more the quick brown fox jumps over the lazy dog, and the dog does not mind at all. "
REPEATS = 4
END = "<|return|>"


@dataclass(frozen=True, slots=True)
class Script:
    """A reply: opening, then text, then the end; where the end does not stop a sequence, the text goes on for ever."""

    opening: list[int]  # token ids
    text: list[int]
    end: int

    @classmethod
    def from_folder(cls, folder: Path) -> "Script":
        """The default reply, an analysis and a final message, in the vocabulary of folder/tokenizer.json."""
        path = folder / "tokenizer.json"
        tokenizer, _ = read_tokenizer(path)
        end = tokenizer.token_to_id(END)
        if end is None:
            raise ValueError(f"{path} has no token {END}")
        with library_errors(f"{path} fails on a text"):
            opening, text = (tokenizer.encode(part, add_special_tokens=False).ids for part in (REPLY, TEXT * REPEATS))
        return cls(opening, text, end)


class Reply:
    """What one slot says: position -> token."""

    def __init__(self, script: Script, new: NewSequence) -> None:
        self.prompt = new.token_ids[: new.num_prompt_tokens]
        self.sampling = new.sampling
        ends = script.end in new.sampling.stop_token_ids
        self._tokens = [*script.opening, *script.text, *([script.end] if ends else [])]
        self._text = script.text

    def token(self, position: int) -> int:
        generated = position - len(self.prompt)
        tokens = self._tokens
        if generated < len(tokens):
            return tokens[generated]
        return self._text[(generated - len(tokens)) % len(self._text)]


@dataclass(slots=True)
class _Step:
    """A step on its way."""

    plan: StepPlan
    replies: list[Reply]  # aligned with plan.sequences
    done_s: float  # by time.monotonic()
    token_ids: list[int]  # of the sequences that sample
    errors: dict[int, str]


class FakeExecutor:
    """An Executor. Without grammars, the token at a position depends on how many were generated before it alone.
    What a grammar does not allow is replaced by something that depends on seed and position.

    Log-probabilities, where asked for, are those of a model that is certain: 0, without alternatives.
    """

    def __init__(
        self,
        script: Script,
        step_s: float,
        grammars: GrammarCache,
        token_s: float = 0.0,
        pages: FakePages | None = None,
        table: StepTable | None = None,
    ) -> None:
        """A step takes `step_s`, and `token_s` for each of its tokens, or as long as the table says.

        `pages`: where keys and values are kept.
        """
        self._script = script
        self._step_s, self._token_s, self._pages, self._table = step_s, token_s, pages, table
        self._takes_time = bool(step_s or token_s or table is not None)
        self._constraints = Constraints(grammars)
        self._replies: dict[int, Reply] = {}  # by slot
        self._launched: deque[_Step] = deque()
        self._device_free_s = 0.0

    def prepare(self, sampling: SamplingParams) -> bool:
        """Whether its grammar is compiled."""
        return sampling.grammar is None or self._constraints.grammars.ready(sampling.grammar)

    def launch(self, plan: StepPlan) -> None:
        self._device_free_s = max(self._device_free_s, time.monotonic()) + self._duration_s(plan)
        for new in plan.new:
            self._replies[new.slot] = Reply(self._script, new)
            self._constraints.assign(new)
        sampling = [(s.slot, s.start + s.num_tokens) for s in plan.sequences if s.sample]
        slots_N, ends_N = np.array(sampling, np.int64).reshape(-1, 2).T
        token_ids = [self._replies[slot].token(end) for slot, end in sampling]
        if self._constraints.any(slots_N):
            self._constrain(token_ids, slots_N, ends_N)
        self._constraints.sampled(slots_N, lambda: np.array(token_ids, np.int64))
        errors = self._constraints.errors(s.slot for s in plan.sequences)
        if self._pages is not None:
            errors |= self._pages.run(plan, {slot: token for (slot, _), token in zip(sampling, token_ids, strict=True)})
        replies = [self._replies[s.slot] for s in plan.sequences]
        self._launched.append(_Step(plan, replies, self._device_free_s, token_ids, errors))

    def _duration_s(self, plan: StepPlan) -> float:
        if self._table is not None:
            return self._table.step_s(features_of(plan.sequences))
        return self._step_s + self._token_s * plan.num_tokens if self._token_s else self._step_s

    def _constrain(self, token_ids: list[int], slots_N: IntArray, ends_N: IntArray) -> None:
        """Replaces tokens that may not come. The tokens before them are not there before their step is done."""
        if self._launched:
            _sleep_until(self._launched[-1].done_s)
        rows_K = self._constraints.advance(slots_N)
        if rows_K:
            masks_KW = np.empty((len(rows_K), self._constraints.grammars.num_words), np.int32)
            no_drafts = np.zeros_like(slots_N)
            self._constraints.fill(Rows(slots_N, no_drafts, lambda: ends_N, lambda: no_drafts), rows_K, masks_KW)
            for row, mask_W in zip(rows_K, masks_KW, strict=True):
                seed = self._replies[int(slots_N[row])].sampling.seed
                draw = (seed + int(ends_N[row]) * 2654435761) % 4294967291  # neighbours are far apart
                token_ids[row] = _allowed(mask_W, token_ids[row], draw)
        self._device_free_s = max(self._device_free_s, time.monotonic())

    def collect(self) -> StepResult:
        step = self._launched.popleft()
        if self._takes_time:
            _sleep_until(step.done_s)
        token_ids: list[list[int]] = []
        logprobs: list[list[TokenLogprobs] | None] = []
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        said = iter(step.token_ids)
        for sequence, reply in zip(step.plan.sequences, step.replies, strict=True):
            end = sequence.start + sequence.num_tokens
            sampled = [next(said)] if sequence.sample else []
            token_ids.append(sampled)
            logprobs.append(_certain(sampled) if reply.sampling.logprobs is not None else None)
            if reply.sampling.prompt_logprobs is not None:
                prompt_logprobs[sequence.slot] = _certain(reply.prompt[sequence.start + 1 : end + 1])
        return StepResult(step.plan.step, token_ids, logprobs, prompt_logprobs, step.errors or None)


def _allowed(mask_W: ColumnArray, token_id: int, draw: int) -> int:
    """The token if it may come, or else one that `draw` decides."""
    bits_W = mask_W.view(np.uint32)
    if int(bits_W[token_id // 32]) >> token_id % 32 & 1:
        return token_id
    words = bits_W.nonzero()[0]
    word = int(words[draw % len(words)])
    allowed = [token for token in range(32) if int(bits_W[word]) >> token & 1]
    return 32 * word + allowed[draw % len(allowed)]


def _sleep_until(time_s: float) -> None:
    time.sleep(max(0.0, time_s - time.monotonic()))


def _certain(token_ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, 0.0, ()) for token in token_ids]
