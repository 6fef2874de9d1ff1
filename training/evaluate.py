"""Held-out accuracy, greedy, one line per skill.

    python -m training.evaluate [--cases 50] [--model FOLDER]
    python -m training.evaluate --device cuda --kv-cache-dtype auto,fp8 --activation-dtype auto,fp8 --cases 10

With several types of keys or of activations, each combination has an engine of its own, one after the other, which has
all questions at once. A table compares them.
"""

import argparse
import gc
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from time import perf_counter
from typing import Any

from oscine.chat.grammar import JsonFormat, turn_grammar
from oscine.engine.build import build_engine
from oscine.engine.core import offline
from oscine.engine.core.loop import EngineLoop
from oscine.settings.config import OPTIONS, CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from oscine.types import GenerationRequest, SamplingParams
from training.builtin_tools import beside_builtin_tools
from training.calls import call, no_call
from training.chitchat import identity, introduction, refusal, today
from training.conversations import Sample, multi_turn, single
from training.declined import beyond, not_on_offer
from training.episode import Effort, Episode, ask
from training.extraction import extraction
from training.extraction_calls import beside_classes, extraction_call, forced_call
from training.json_mode import JSON_OBJECT, class_schema, json_mode, unfillable
from training.oddities import UNCLEAR, odd
from training.packing import Encoder
from training.recall import NOT_SAID, recall
from training.split import Draw
from training.sums import arithmetic

Generate = Callable[[list[list[int]], int, list[str | None]], list[list[int]]]  # prompts, tokens at most, grammars
Check = Callable[[Sample, str], bool]
NANO = Path("oscine/model/nano")
MAX_TOKENS = 448
SEED = 20_250
LONG = "recall at 4,000 tokens"
COMPARED_CACHE = 2 << 30  # bytes of an engine that is compared
_WEIGHTS = OPTIONS["cpu-weights"]
_WORDS_PER_TOKEN = 0.53  # in the texts with hidden facts


def free(made: Sample) -> None:
    """No constraint."""


@dataclass(frozen=True)
class Skill:
    name: str
    make: Callable[[Draw], Sample]
    right: Check
    grammar: Callable[[Sample], str | None] = free  # the server's grammar for such a request


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
    """Whether a value satisfies a schema of the kinds that training.extraction makes."""
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


def equal_json(made: Sample, output: str) -> bool:
    """The expected JSON values, in any spelling, in the answer or the arguments."""
    try:
        if made.completion.tool_calls:
            name, arguments = function_call(output) or ("", "null")
            expected = made.completion.tool_calls[-1]
            return name == expected.name and bool(json.loads(arguments) == json.loads(expected.arguments))
        return bool(json.loads(final_answer(output) or "null") == json.loads(made.completion.content))
    except json.JSONDecodeError:
        return False


def answers(made: Sample, output: str) -> bool:
    """Any answer that ends, and no call."""
    return bool(final_answer(output))


def ends(made: Sample, output: str) -> bool:
    """A call or an answer, to its end."""
    return bool(final_answer(output) or function_call(output))


def named(made: Sample) -> str | None:
    """The grammar of a `tool_choice` with the name of a function."""
    (call,) = made.completion.tool_calls
    tools = tuple(tool for tool in made.conversation.tools if tool.name == call.name)
    return turn_grammar(None, tools, "required", parallel=False)


def required(made: Sample) -> str | None:
    return turn_grammar(None, made.conversation.tools, "required")


def json_object(made: Sample) -> str | None:
    return turn_grammar(JsonFormat({"type": "object"}))


def json_schema(made: Sample) -> str | None:
    assert made.conversation.response_schema is not None
    return turn_grammar(JsonFormat(made.conversation.response_schema.schema))


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


def _such(make: Callable[[Draw, Effort], Episode], fits: Callable[[Episode], bool]) -> Callable[[Draw], Sample]:
    """The last answer of a matching episode."""

    def made(draw: Draw) -> Sample:
        while True:
            episode = make(draw, "medium")
            if fits(episode):
                return single(draw, episode, "medium", "2025-11-03", len(episode.messages) - 1)

    return made


def _empty(draw: Draw) -> Sample:
    effort: Effort = draw.choice(("low", "medium", "high"))
    text = draw.choice(("", "", "", " ", "\n", "?", ".", "a", "   ", "!", "-", "0"))
    return single(draw, ask("empty prompt", text, None, UNCLEAR), effort, draw.choice(("", "2025-11-03")), 1)


def _in_json(draw: Draw, effort: Effort) -> Episode:
    """The server's grammar of JSON mode."""
    return replace(json_mode(draw, effort), response_schema=JSON_OBJECT)


def _fenced(episode: Episode) -> bool:
    return episode.messages[-1].content.startswith("```")


def _small_talk_beside_tools(draw: Draw, effort: Effort) -> Episode:
    return no_call(draw, draw.choice((identity, refusal, odd, beyond))(draw, effort))


def _small_talk_beside_classes(draw: Draw, effort: Effort) -> Episode:
    return beside_classes(draw, draw.choice((identity, refusal, odd))(draw, effort))


def _beside_builtin_tools(draw: Draw, effort: Effort) -> Episode:
    return beside_builtin_tools(draw, draw.choice((arithmetic, identity, refusal))(draw, effort))


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
    Skill(LONG, _recall(4000), same_answer),
    Skill("multi-turn", lambda draw: multi_turn(draw, "medium", "2025-11-03"), same_answer),
    Skill("what the user said before", _last(introduction), same_answer),
    Skill("identity and small talk", _last(identity), same_answer),
    Skill("refusal", _last(refusal), same_answer),
    Skill("refusal beside tools", _last(lambda d, e: no_call(d, refusal(d, e))), same_answer),
    Skill("date", _last(lambda d, e: today(d, e, "2025-11-03")), same_answer),
    Skill("named call, class", _such(extraction_call, lambda e: len(e.tools) == 1), equal_json, named),
    Skill("named call among functions", _such(extraction_call, lambda e: len(e.tools) > 1), equal_json, named),
    Skill("named call, function", _call("tool call"), equal_json, named),
    Skill("required call, class", _such(extraction_call, lambda e: True), equal_json, required),
    Skill("required call, function", _call("tool call"), equal_json, required),
    Skill("automatic call, class", _last(extraction_call), equal_json),
    Skill("forced call that nothing fills", _last(forced_call), ends, named),
    Skill(
        "JSON mode, schema in the prompt",
        _such(_in_json, lambda e: "schema" in e.skill and not _fenced(e)),
        equal_json,
        json_object,
    ),
    Skill(
        "JSON mode, keys in the prompt",
        _such(_in_json, lambda e: "keys in" in e.skill and not _fenced(e)),
        equal_json,
        json_object,
    ),
    Skill("JSON mode, sums", _such(_in_json, lambda e: e.skill == "JSON, sum"), equal_json, json_object),
    Skill("JSON mode, no keys", _such(_in_json, lambda e: e.skill == "JSON, no keys"), equal_json, json_object),
    Skill(
        "JSON asked for in the prompt",
        _such(json_mode, lambda e: e.response_schema is None and not _fenced(e)),
        equal_json,
    ),
    Skill("JSON for a class", _last(class_schema), equal_json, json_schema),
    Skill("JSON schema that nothing fills", _last(unfillable), ends, json_schema),
    Skill("empty prompt ends", _empty, answers),
    Skill("odd prompt ends", _last(odd), answers),
    Skill("odd prompt ends, low effort", _last(odd, "low"), answers),
    Skill("odd prompt ends, high effort", _last(odd, "high"), answers),
    Skill("no function for it", _last(not_on_offer), same_answer),
    Skill("sums beyond the skills", _last(beyond), same_answer),
    Skill("small talk beside tools", _last(_small_talk_beside_tools), answers),
    Skill("small talk beside classes", _last(_small_talk_beside_classes), answers),
    Skill("built-in tools not needed", _last(_beside_builtin_tools), same_answer),
)


@dataclass(frozen=True)
class Asked:
    """The cases of a skill."""

    skill: Skill
    samples: list[Sample]

    @classmethod
    def of(cls, skill: Skill, cases: int) -> "Asked":
        return cls(skill, [skill.make(Draw(SEED + i, held_out=True)) for i in range(cases)])

    def wrong(self, texts: Sequence[str]) -> list[tuple[Sample, str]]:
        return [
            (made, text) for made, text in zip(self.samples, texts, strict=True) if not self.skill.right(made, text)
        ]


def answer(generate: Generate, encoder: Encoder, asked: Sequence[Asked]) -> list[list[str]]:
    """Texts by skill. All questions are asked at once."""
    prompts = [encoder.prompt(made) for one in asked for made in one.samples]
    grammars = [one.skill.grammar(made) for one in asked for made in one.samples]
    texts = map(encoder.tokenizer.decode, generate(prompts, MAX_TOKENS, grammars))
    return [[*islice(texts, len(one.samples))] for one in asked]


def evaluate(
    generate: Generate, encoder: Encoder, cases: int, verbose: bool = False, only: str = ""
) -> dict[str, float]:
    """Accuracy of each skill; prints a line for each, and the wrong answers if `verbose`."""
    accuracy = {}
    for skill in (skill for skill in SKILLS if only in skill.name):
        asked = Asked.of(skill, cases)
        wrong = asked.wrong(answer(generate, encoder, [asked])[0])
        accuracy[skill.name] = 1 - len(wrong) / cases
        print(f"{skill.name:34}{cases:6} cases {accuracy[skill.name]:8.1%}", flush=True)
        for made, text in wrong if verbose else []:
            print(f"    asked    {made.conversation.messages[-1].content[-200:]!r}")
            print(f"    expected {made.completion.content!r} {made.completion.tool_calls}\n    got      {text!r}")
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=NANO, help="folder of the model (default: %(default)s)")
    parser.add_argument("--cases", type=int, default=50, help="cases per skill (default: %(default)s)")
    parser.add_argument("--only", default="", help="measure only the skills whose names contain this")
    parser.add_argument("--device", default="cpu", help="device that the model runs on (default: %(default)s)")
    parser.add_argument("--cpu-weights", choices=_WEIGHTS.choices, default=_WEIGHTS.default, help=_WEIGHTS.help_text)
    for name in ("kv-cache-dtype", "activation-dtype"):
        known = OPTIONS[name]
        told = f"{known.help}; several with commas between them are compared (default: {known.default})"
        parser.add_argument(f"--{name}", type=several(known.choices), default=[known.default], help=told)
    parser.add_argument("--long", type=int, help=f"cases of {LONG} in a comparison (default: as --cases)")
    parser.add_argument("--verbose", action="store_true", help="print the wrong answers of a single engine")
    options = parser.parse_args()
    skills = [skill for skill in SKILLS if options.only in skill.name]
    if not skills:
        parser.error(f"--only: no skill has {options.only!r} in its name")
    encoder = Encoder(options.model)
    model = ModelOptions(str(options.model), device=options.device, cpu_weights=options.cpu_weights)
    pairs = [*product(options.activation_dtype, options.kv_cache_dtype)]
    engines = [
        EngineOptions(replace(model, activation_dtype=activation), CacheOptions(kv_cache_dtype=kv), quiet=True)
        for activation, kv in pairs
    ]
    if len(engines) == 1:
        loop = build_engine(engines[0]).loop
        evaluate(engine_generator(loop, encoder), encoder, options.cases, options.verbose, options.only)
        return
    many = options.cases if options.long is None else options.long
    asked = [Asked.of(skill, many if skill.name == LONG else options.cases) for skill in skills]
    names = [f"activations {activation}, keys {kv}" for activation, kv in pairs]
    compare(encoder, asked, dict(zip(names, engines, strict=True)))


def several(choices: Collection[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes some of these, with commas between them."""

    def parse(text: str) -> list[str]:
        found = text.split(",")
        if not set(found) <= set(choices):
            raise argparse.ArgumentTypeError(f"some of {','.join(choices)}, not {text}")
        return found

    return parse


def compare(encoder: Encoder, asked: Sequence[Asked], engines: dict[str, EngineOptions]) -> None:
    """Prints the accuracy of each engine, and the skills in which they differ."""
    limits = SchedulerOptions(max_num_seqs=128, max_num_batched_tokens=4096)
    found: dict[str, list[list[str]]] = {}
    for name, options in engines.items():
        began_s = perf_counter()
        cache = replace(options.cache, kv_cache_bytes=COMPARED_CACHE)
        built = build_engine(replace(options, cache=cache, scheduler=limits))
        ready_s = perf_counter()
        found[name] = answer(engine_generator(built.loop, encoder), encoder, asked)
        print(f"{name}: ready after {ready_s - began_s:.1f} s, answers {perf_counter() - ready_s:.1f} s", flush=True)
        del built
        gc.collect()
    print_tables(asked, found)


def print_tables(asked: Sequence[Asked], found: Mapping[str, list[list[str]]]) -> None:
    """found: the answers of each engine, by skill."""
    first, *_ = found.values()
    print("\n| precision | right | share | other texts than the first |\n|---|---|---|---|")
    for name, texts in found.items():
        pairs = [*zip(asked, texts, strict=True)]
        total = sum(len(one.samples) for one in asked)
        right = total - sum(len(one.wrong(of_skill)) for one, of_skill in pairs)
        others = sum(
            ours != theirs for pair in zip(texts, first, strict=True) for ours, theirs in zip(*pair, strict=True)
        )
        print(f"| {name} | {right} of {total} | {right / total:.2%} | {others} |")
    print(f"\n| wrong answers of | cases | {' | '.join(found)} |\n|---|---|{'---|' * len(found)}")
    for i, one in enumerate(asked):
        wrong = [len(one.wrong(texts[i])) for texts in found.values()]
        if any(wrong) or one.skill.name == LONG:
            print(f"| {one.skill.name} | {len(one.samples)} | {' | '.join(map(str, wrong))} |")


def engine_generator(loop: EngineLoop, encoder: Encoder) -> Generate:
    """Oscine's own engine, as it serves: continuous batching, chunked prefill, prefix reuse."""
    turn_end_ids = encoder.tokenizer.turn_end_ids

    def generate(prompts: list[list[int]], max_tokens: int, grammars: list[str | None]) -> list[list[int]]:
        greedy = SamplingParams(max_tokens, temperature=0.0, stop_token_ids=turn_end_ids)
        requests = [
            GenerationRequest(str(i), prompt, replace(greedy, grammar=grammar))
            for i, (prompt, grammar) in enumerate(zip(prompts, grammars, strict=True))
        ]
        outputs = offline.generate(loop, requests)
        return [[i for output in outputs[r.request_id] for i in output.token_ids] for r in requests]

    return generate


if __name__ == "__main__":
    main()
