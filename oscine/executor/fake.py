"""An executor that computes nothing: every sequence gets the same scripted reply, at a given pace.

For measuring and testing everything around the model. No torch. A step on the imagined device begins when it is
launched or when the step before it ends, so overlapped scheduling overlaps here as well.
"""

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from oscine.types import NewSequence, StepPlan, StepResult, TokenLogprobs

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
        if not path.is_file():
            raise ValueError(f"tokenizer file {path} does not exist")
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        end = tokenizer.token_to_id(END)
        if end is None:
            raise ValueError(f"{path} has no token {END}")
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


class FakeExecutor:
    """An AsyncExecutor. The token at a position depends on how many were generated before it, and on nothing else.

    Log-probabilities, where asked for, are those of a model that is certain: 0, without alternatives.
    """

    def __init__(self, script: Script, step_s: float) -> None:
        self._script = script
        self._step_s = step_s
        self._replies: dict[int, Reply] = {}  # by slot
        self._launched: deque[tuple[float, StepPlan]] = deque()  # when it will be done, by time.monotonic()
        self._device_free_s = 0.0

    def launch(self, plan: StepPlan) -> None:
        self._device_free_s = max(self._device_free_s, time.monotonic()) + self._step_s
        self._launched.append((self._device_free_s, plan))

    def collect(self) -> StepResult:
        done_s, plan = self._launched.popleft()
        if self._step_s:
            time.sleep(max(0.0, done_s - time.monotonic()))
        for new in plan.new:
            self._replies[new.slot] = Reply(self._script, new)
        return self._result(plan)

    def _result(self, plan: StepPlan) -> StepResult:
        replies, token_ids = self._replies, []
        logprobs: list[list[TokenLogprobs] | None] = []
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for sequence in plan.sequences:
            reply = replies[sequence.slot]
            end = sequence.start + sequence.num_tokens
            sampled = [reply.token(end)] if sequence.sample else []
            token_ids.append(sampled)
            logprobs.append(_certain(sampled) if reply.sampling.logprobs is not None else None)
            if reply.sampling.prompt_logprobs is not None:
                prompt_logprobs[sequence.slot] = _certain(reply.prompt[sequence.start + 1 : end + 1])
        return StepResult(plan.step, token_ids, logprobs, prompt_logprobs)


def _certain(token_ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, 0.0, ()) for token in token_ids]
