"""Fifty questions to an engine, graded as `oscine eval` grades: sums, and calls of functions.

They are skills of the embedded model that any gpt-oss has. The answers are greedy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from oscine.api.serving.schemas import ChatCompletionRequest
from oscine.api.turns.conversation import conversation
from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.tokenizer import Tokenizer
from oscine.engine.core import offline
from oscine.engine.core.loop import EngineLoop
from oscine.extensions.eval import task
from oscine.extensions.eval.grade import Answer, Call
from oscine.extensions.verify.harmony import DATE, parsed
from oscine.types import GenerationRequest, SamplingParams

FILE = Path(__file__).with_name("questions.jsonl")
MAX_TOKENS = 1024
LEAST = 0.5  # share of right answers below which a model does not agree with its weights


@dataclass(frozen=True, slots=True)
class Answers:
    questions: int
    right: int
    truncated: int
    wrong: tuple[str, ...]  # ids

    @property
    def agrees(self) -> bool:
        return self.right >= LEAST * self.questions


def most_tokens(tokenizer: Tokenizer) -> int:
    """Of a question and its answer together."""
    return MAX_TOKENS + max(len(one.prompt_token_ids) for one in _requests(task.read(FILE), tokenizer))


def ask(loop: EngineLoop, tokenizer: Tokenizer, *, count: int | None = None) -> Answers:
    """`count`: of questions (default: all)."""
    tasks = task.read(FILE)[:count]
    outputs, right, truncated, wrong = offline.generate(loop, _requests(tasks, tokenizer)), 0, 0, list[str]()
    for one in tasks:
        found = parsed(tokenizer, [i for output in outputs[one.id] for i in output.token_ids])
        cut = outputs[one.id][-1].finish_reason == "length"
        answer = Answer(found.content, tuple(Call(*call) for call in found.calls), "length" if cut else "stop")
        truncated += cut
        if one.expected.grade(answer).is_right:
            right += 1
        else:
            wrong.append(one.id)
    return Answers(len(tasks), right, truncated, tuple(wrong))


def _requests(tasks: Sequence[task.Task], tokenizer: Tokenizer) -> list[GenerationRequest]:
    renderer = HarmonyRenderer(tokenizer)
    sampling = SamplingParams(MAX_TOKENS, temperature=0.0, stop_token_ids=(tokenizer.return_, tokenizer.call))
    requests = []
    for one in tasks:
        asked = msgspec.json.decode(msgspec.json.encode(one.body), type=ChatCompletionRequest)
        requests.append(GenerationRequest(one.id, renderer.render(conversation(asked, DATE)), sampling))
    return requests
