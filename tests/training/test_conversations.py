"""Generated conversations: true facts, calls that fit their functions, and a held-out split without overlap."""

import json
import re
from collections.abc import Callable

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.chat.messages import Conversation, Message
from training.arithmetic import reasoning, statement
from training.conversations import Sample, sample, single
from training.declined import beyond, not_on_offer, without_form
from training.episode import Effort, Episode
from training.evaluate import SKILLS, final_answer, function_call, valid_json
from training.extraction import extraction
from training.extraction_calls import extraction_call, forced_call
from training.json_mode import class_schema, keys_named, schema_shown, unfillable
from training.oddities import odd
from training.packing import Encoder, PackedRows
from training.recall import NOT_SAID, recall
from training.scenes import scene
from training.split import Draw, is_held_out
from training.sums import operands
from training.words import city, first_name

_TERM = r"(?<![\d.])-?\d+(?: ?[-+*] ?\d+)+ ?= ?-?\d+"
_RUNNING = re.compile(r"(\d+) \* (\d+) = (\d+), plus (\d+) is (\d+)")


@given(
    st.integers(0, 99_999), st.sampled_from("+-*"), st.integers(0, 99_999), st.sampled_from(["low", "medium", "high"])
)
@settings(max_examples=200)
def test_every_equation_in_a_reasoning_is_true(a: int, operator: str, b: int, effort: str) -> None:
    if operator == "*":
        a, b = a % 1000, b % 100
    text = reasoning(a, operator, b, effort) or ""
    for equation in [*re.findall(_TERM, text), statement(a, operator, b)]:
        left, right = equation.split("=")
        assert eval(left) == int(right), equation
    for x, y, product, carry, total in _RUNNING.findall(text):
        assert int(x) * int(y) == int(product)
        assert int(product) + int(carry) == int(total)


@given(st.integers(0, 9999), st.integers(0, 9999))
@settings(max_examples=100)
def test_the_digits_written_are_the_sum(a: int, b: int) -> None:
    written = re.findall(r"write (\d)", reasoning(a, "+", b, "medium") or "")
    assert int("".join(reversed(written))) == a + b


def test_efforts_differ_in_length() -> None:
    lengths = [len(reasoning(437, "+", 285, effort) or "") for effort in ("low", "medium", "high")]
    assert lengths == sorted(set(lengths))


@pytest.mark.long
def test_training_and_held_out_draws_share_nothing() -> None:
    for make in (city, first_name, lambda draw: operands(draw, "+"), lambda draw: operands(draw, "*")):
        seen = {make(Draw(seed)) for seed in range(600)}
        held_out = {make(Draw(seed, held_out=True)) for seed in range(600)}
        assert not seen & held_out
        assert len(held_out) > 10


def test_no_held_out_function_name_city_or_sum_in_the_training_mixture() -> None:
    draw = Draw(3)
    for made in (sample(draw) for _ in range(300)):
        assert not [tool.name for tool in made.conversation.tools if is_held_out("function", tool.name)]
        if made.skill == "addition":
            pair = tuple(int(part) for part in re.findall(r"\d+", made.completion.content)[:2])
            assert not is_held_out("+", str(pair))


def test_calls_name_a_function_on_offer_and_its_parameters() -> None:
    draw = Draw(5)
    calls = 0
    for made in (sample(draw) for _ in range(400)):
        for asked in made.completion.tool_calls:
            calls += 1
            parameters = next(tool.parameters for tool in made.conversation.tools if tool.name == asked.name)
            assert parameters is not None
            arguments = json.loads(asked.arguments)
            assert set(parameters["required"]) <= set(arguments) <= set(parameters["properties"])
            assert list(arguments) == [name for name in parameters["properties"] if name in arguments]
    assert calls > 50


def test_json_answers_fit_their_schema() -> None:
    for seed in range(200):
        made = single(Draw(seed), extraction(Draw(seed), "low"), "low")
        assert valid_json(made, f"<|channel|>final<|message|>{made.completion.content}<|return|>")


@pytest.mark.long
@pytest.mark.parametrize("make", [schema_shown, keys_named, class_schema, unfillable, extraction_call, forced_call])
def test_what_is_extracted_fits_its_schema(make: Callable[[Draw, Effort], Episode]) -> None:
    for seed in range(150):
        made = single(Draw(seed), make(Draw(seed), "medium"), "medium")
        if made.completion.tool_calls:
            (call,) = made.completion.tool_calls
            schema = next(tool.parameters for tool in made.conversation.tools if tool.name == call.name)
            assert schema is not None
            jsonschema.validate(json.loads(call.arguments), schema)
        elif made.conversation.response_schema is not None:
            jsonschema.validate(json.loads(made.completion.content), made.conversation.response_schema.schema)


def test_facts_of_a_scene_stand_in_its_text() -> None:
    for seed in range(300):
        made = scene(Draw(seed))
        for fact in made.facts:
            if isinstance(fact.value, str) and "enum" not in fact.schema:
                assert fact.value in made.text


def test_of_a_forced_call_only_the_arguments_are_learnt() -> None:
    encoder = Encoder("oscine/model/nano")
    for seed in range(20):
        made = single(Draw(seed), forced_call(Draw(seed), "medium"), "medium")
        tokens, weights = encoder.document(made)
        learnt = [token for token, weight in zip(tokens, weights, strict=True) if weight == 1.0]
        assert encoder.tokenizer.decode(learnt) == f"{made.completion.tool_calls[0].arguments}<|call|>"


def test_nothing_is_called_that_is_not_on_offer() -> None:
    for make in (odd, beyond, not_on_offer, without_form):
        for seed in range(100):
            episode = make(Draw(seed), "medium")
            assert not any(message.tool_calls for message in episode.messages)
            offered = {tool.name for tool in episode.tools}
            assert not any(f"Call {name} " in episode.messages[0].content for name in offered)


def test_recalled_sentences_stand_in_the_text() -> None:
    for seed in range(100):
        episode = recall(Draw(seed), "medium", 200)
        texts = [message.content for message in episode.messages[:-1]] + [episode.instructions]
        answer = episode.messages[-1].content
        assert (answer == NOT_SAID) != any(answer in text for text in texts)


def test_every_skill_has_cases_and_accepts_its_own_answer() -> None:
    encoder = Encoder("oscine/model/nano")
    for skill in SKILLS:
        made = skill.make(Draw(7, held_out=True))
        output = encoder.tokenizer.decode(encoder.renderer.render_completion(made.completion))
        assert skill.right(made, output), skill.name
        assert not skill.right(made, output[:-12]), skill.name


def test_outputs_that_end_wrongly_are_no_answers() -> None:
    assert final_answer("<|channel|>final<|message|>85<|end|>") is None
    assert final_answer("<|channel|>final<|message|>85<|end|><|start|>user<|message|>x<|return|>") is None
    assert function_call("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|return|>") is None


def test_earlier_turns_of_the_assistant_are_not_imitated() -> None:
    encoder = Encoder("oscine/model/nano")
    turns = (Message("user", "Hi"), Message("assistant", "Hello"), Message("user", "Bye"))
    for context_weight, text_weight in ((0.0, 0.0), (0.5, 0.5)):
        made = Sample("x", Conversation(turns), Message("assistant", "Goodbye!"), context_weight)
        tokens, weights = encoder.document(made)
        said = tokens.index(encoder.tokenizer.encode("Hello")[0])
        assert weights[said] == text_weight
        assert weights[tokens.index(encoder.tokenizer.end, said)] == 0.0
        assert weights[-1] == 1.0


def test_rows_hold_whole_documents() -> None:
    encoder = Encoder("oscine/model/nano")
    row = next(iter(PackedRows("oscine/model/nano", 2048, seed=1)))
    assert row.ids.shape == (2049,)
    starts = sorted({*row.starts.tolist()})
    assert len(starts) > 2
    for start in starts[:-1]:
        assert row.ids[start] == encoder.tokenizer.start
        assert start == 0 or row.weights[start - 1] == 0.0  # nothing predicts a document's first token
    assert (row.starts <= range(2048)).all()
