"""Held-out accuracy, greedy, one line a skill: `python -m training.evaluate [--cases 50] [--model FOLDER]`.

Knows what a right answer of each skill is. Takes any function that continues prompts.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscine.config import EngineOptions, ModelOptions
from oscine.engine import offline
from oscine.engine.build import build_engine
from oscine.engine.loop import EngineLoop
from oscine.types import GenerationRequest, SamplingParams
from training.calls import call
from training.chitchat import identity, introduction, refusal, today
from training.conversations import Sample, multi_turn, no_call, single
from training.episode import Effort
from training.extraction import extraction
from training.packing import Encoder
from training.recall import NOT_SAID, recall
from training.split import Draw
from training.sums import arithmetic

Generate = Callable[[list[list[int]], int], list[list[int]]]
Check = Callable[[Sample, str], bool]
NANO = Path("oscine/model/nano")
MAX_TOKENS = 448
_SEED = 20_250
_WORDS_PER_TOKEN = 0.53  # of the texts in which facts are hidden


@dataclass(frozen=True)
class Skill:
    name: str
    make: Callable[[Draw], Sample]
    right: Check


def final_answer(output: str) -> str | None:
    found = re.search(r"<\|channel\|>final<\|message\|>(.*)<\|return\|>$", output, re.DOTALL)
    return found[1] if found and "<|" not in found[1] else None


def function_call(output: str) -> tuple[str, str] | None:
    """Name and arguments of the call that ends the output."""
    pattern = r"<\|channel\|>commentary to=functions\.(\S+) <\|constrain\|>json<\|message\|>(.*)<\|call\|>$"
    found = re.search(pattern, output, re.DOTALL)
    return (found[1], found[2]) if found else None


def same_answer(made: Sample, output: str) -> bool:
    """The final answer, or the call with its arguments, word by word as expected."""
    if not made.completion.tool_calls:
        return final_answer(output) == made.completion.content
    expected = made.completion.tool_calls[-1]
    return function_call(output) == (expected.name, expected.arguments)


def valid_json(made: Sample, output: str) -> bool:
    answer = final_answer(output)
    assert made.conversation.response_schema is not None
    try:
        return answer is not None and _fits(json.loads(answer), made.conversation.response_schema.schema)
    except json.JSONDecodeError:
        return False


def _fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value has the schema, of the kinds that training.extraction makes."""
    kind = schema["type"]
    if kind == "object":
        properties = schema["properties"]
        if not isinstance(value, dict) or not set(schema.get("required", properties)) <= set(value) <= set(properties):
            return False
        return all(_fits(value[name], properties[name]) for name in value)
    if kind == "array":
        return isinstance(value, list) and all(_fits(item, schema["items"]) for item in value)
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "string":
        return isinstance(value, str) and value in schema.get("enum", [value])
    return isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool)


def _sum(operator: str, effort: Effort = "medium") -> Callable[[Draw], Sample]:
    return lambda draw: single(draw, arithmetic(draw, effort, operator, 3), effort, "2025-11-03")


def _call(skill: str, answer: bool = False) -> Callable[[Draw], Sample]:
    """The (last) call, or the answer after its result."""

    def make(draw: Draw) -> Sample:
        while True:
            episode = call(draw, "medium")
            if episode.skill == skill:
                return single(draw, episode, "medium", "2025-11-03", len(episode.messages) - (1 if answer else 3))

    return make


def _recall(num_tokens: int) -> Callable[[Draw], Sample]:
    def make(draw: Draw) -> Sample:
        while True:
            episode = recall(draw, "medium", int(num_tokens * _WORDS_PER_TOKEN))
            if episode.messages[-1].content != NOT_SAID:
                return single(draw, episode, "medium", "2025-11-03", len(episode.messages) - 1)

    return make


def _last(make: Callable[[Draw, Effort], Any], effort: Effort = "medium") -> Callable[[Draw], Sample]:
    def made(draw: Draw) -> Sample:
        episode = make(draw, effort)
        return single(draw, episode, effort, "2025-11-03", len(episode.messages) - 1)

    return made


SKILLS = (
    Skill("addition, up to 3 digits", _sum("+"), same_answer),
    Skill("subtraction, up to 3 digits", _sum("-"), same_answer),
    Skill("multiplication, small", _sum("*"), same_answer),
    Skill("addition, low effort", _sum("+", "low"), same_answer),
    Skill("addition, high effort", _sum("+", "high"), same_answer),
    Skill("subtraction, low effort", _sum("-", "low"), same_answer),
    Skill("subtraction, high effort", _sum("-", "high"), same_answer),
    Skill("tool call", _call("tool call"), same_answer),
    Skill("second tool call", _call("two tool calls"), same_answer),
    Skill("tool call for a follow-up", _call("tool call again"), same_answer),
    Skill("answer from a tool's result", _call("tool call", answer=True), same_answer),
    Skill("no tool needed", _last(lambda d, e: no_call(d, arithmetic(d, e, "+", 3))), same_answer),
    Skill("JSON valid for the schema", _last(extraction), valid_json),
    Skill("JSON equal to the expected", _last(extraction), same_answer),
    Skill("recall at 500 tokens", _recall(500), same_answer),
    Skill("recall at 2,000 tokens", _recall(2000), same_answer),
    Skill("recall at 4,000 tokens", _recall(4000), same_answer),
    Skill("multi-turn", lambda draw: multi_turn(draw, "medium", "2025-11-03"), same_answer),
    Skill("what the user said before", _last(introduction), same_answer),
    Skill("identity and small talk", _last(identity), same_answer),
    Skill("refusal", _last(refusal), same_answer),
    Skill("refusal beside tools", _last(lambda d, e: no_call(d, refusal(d, e))), same_answer),
    Skill("date", _last(lambda d, e: today(d, e, "2025-11-03")), same_answer),
)


def evaluate(generate: Generate, encoder: Encoder, cases: int, verbose: bool = False) -> dict[str, float]:
    """Accuracy of each skill; prints a line for each, and the wrong answers if `verbose`."""
    accuracy = {}
    for skill in SKILLS:
        samples = [skill.make(Draw(_SEED + i, held_out=True)) for i in range(cases)]
        outputs = generate([encoder.prompt(made) for made in samples], MAX_TOKENS)
        texts = [encoder.tokenizer.decode(output) for output in outputs]
        wrong = [(made, text) for made, text in zip(samples, texts, strict=True) if not skill.right(made, text)]
        accuracy[skill.name] = 1 - len(wrong) / cases
        print(f"{skill.name:30}{cases:6} cases {accuracy[skill.name]:8.1%}", flush=True)
        for made, text in wrong if verbose else []:
            print(f"    asked    {made.conversation.messages[-1].content[-200:]!r}")
            print(f"    expected {made.completion.content!r} {made.completion.tool_calls}\n    got      {text!r}")
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=NANO)
    parser.add_argument("--cases", type=int, default=50, help="a skill")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--verbose", action="store_true", help="print the wrong answers")
    options = parser.parse_args()
    encoder = Encoder(options.model)
    model = ModelOptions(str(options.model), device=options.device)
    loop = build_engine(EngineOptions(model=model, quiet=True)).loop
    evaluate(engine_generator(loop, encoder), encoder, options.cases, options.verbose)


def engine_generator(loop: EngineLoop, encoder: Encoder) -> Generate:
    """Oscine's own engine, as it serves: continuous batching, chunked prefill, prefix reuse."""
    turn_end_ids = encoder.tokenizer.turn_end_ids

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        greedy = SamplingParams(max_tokens, temperature=0.0, stop_token_ids=turn_end_ids)
        requests = [GenerationRequest(str(i), prompt, greedy) for i, prompt in enumerate(prompts)]
        outputs = offline.generate(loop, requests)
        return [[i for output in outputs[r.request_id] for i in output.token_ids] for r in requests]

    return generate


if __name__ == "__main__":
    main()
