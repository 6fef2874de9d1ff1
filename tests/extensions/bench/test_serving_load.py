"""The loads of `oscine bench serve`: prompts of exact lengths, sessions, files, arrivals."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oscine.chat.tokenizer import Tokenizer
from oscine.checkpoint.hub import NANO_FOLDER
from oscine.extensions.bench.serve.api import APIS
from oscine.extensions.bench.serve.arrival import Arrival
from oscine.extensions.bench.serve.load import FileLoad, Lengths, RandomLoad, Session, Shapes, Turn
from oscine.extensions.bench.serve.words import Words
from oscine.model.o200k import o200k_folder


def words(folder: Path = NANO_FOLDER, seed: int = 1) -> Words:
    return Words.of(folder, seed)


def first(load: RandomLoad | FileLoad, count: int) -> list[Session]:
    return list(itertools.islice(load.sessions(), count))


@pytest.fixture(scope="module", params=["nano", "o200k"])
def vocabulary(request: pytest.FixtureRequest) -> tuple[Tokenizer, Words]:
    folder = NANO_FOLDER if request.param == "nano" else o200k_folder()
    return Tokenizer(folder), words(folder)


@pytest.mark.long
@pytest.mark.parametrize("length", [1, 2, 1000])
def test_a_text_has_exactly_as_many_tokens(vocabulary: tuple[Tokenizer, Words], length: int) -> None:
    tokenizer, source = vocabulary
    texts = [source.text(length) for _ in range(5)]
    assert {len(tokenizer.encode(text)) for text in texts} == {length}
    assert length == 1 or len(set(texts)) == 5
    ids = source.ids(length)
    assert len(ids) == length
    assert len(tokenizer.encode(tokenizer.decode(ids))) == length


def test_a_vocabulary_without_words_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "Ġa": 1}}}))
    with pytest.raises(ValueError, match=r"--tokenizer has 0 words"):
        words(tmp_path)
    with pytest.raises(ValueError, match=r"--tokenizer .* has no vocabulary"):
        words(tmp_path / "absent")


def test_lengths_stay_within_their_spread() -> None:
    load = RandomLoad(words(), Shapes(Lengths(100, 50, 0.5)))
    turns = [turn for session in first(load, 400) for turn in session]
    tokenizer = Tokenizer(NANO_FOLDER)
    isl = [len(tokenizer.encode(str(turn.prompt))) for turn in turns]
    osl = [turn.max_tokens for turn in turns]
    assert (min(isl) >= 50, max(isl) <= 150, len(set(isl)) > 50) == (True, True, True)
    assert (min(osl) >= 25, max(osl) <= 75, len(set(osl)) > 25) == (True, True, True)
    assert abs(np.mean(isl) - 100) < 5


def test_equal_seeds_give_equal_loads_and_others_do_not() -> None:
    one, same, other = (
        first(RandomLoad(words(seed=seed), Shapes(Lengths(20, 20, 0.5), turns=2, seed=seed)), 3) for seed in (1, 1, 2)
    )
    assert one == same != other


def test_shared_prefixes_are_in_addition_to_the_length() -> None:
    load = RandomLoad(words(), Shapes(Lengths(10, 5), turns=2, prefix_tokens=30, num_prefixes=3))
    sessions = first(load, 60)
    tokenizer = Tokenizer(NANO_FOLDER)
    assert {tuple(len(tokenizer.encode(str(turn.prompt))) for turn in session) for session in sessions} == {(40, 10)}
    prefixes = [tuple(str(session[0].prompt).split()[:30]) for session in sessions]
    assert len(set(prefixes)) == 3
    assert len({str(session[0].prompt) for session in sessions}) == 60
    ids = first(RandomLoad(words(), Shapes(Lengths(10, 5), prefix_tokens=30), as_ids=True), 2)
    assert [len(session[0].prompt or "") for session in ids] == [40, 40]
    assert ids[0][0].prompt[:30] == ids[1][0].prompt[:30]  # type: ignore[index]


def test_a_file_of_requests(tmp_path: Path) -> None:
    lines: list[Any] = [
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7, "temperature": 0.5, "model": "x"},
        {"prompt": "Once"},
        {"turns": ["one", "two"], "max_completion_tokens": 3},
        {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {"input": "hey", "max_output_tokens": 4}},
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = first(FileLoad(path, osl=99), 5)
    messages = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}
    assert found[:4] == [
        (Turn(None, 7, messages),),
        (Turn("Once", 99),),
        (Turn("one", 3), Turn("two", 3)),
        (Turn(None, 4, {"input": "hey"}),),
    ]
    assert found[4] == found[0], "from the top again"
    body = json.loads(APIS["chat"].body("m", found[0][0], [], {"temperature": 1, "seed": 2}))
    assert (body["messages"], body["temperature"], body["seed"], body["max_tokens"]) == (
        messages["messages"],
        0.5,
        2,
        7,
    )


@pytest.mark.parametrize("line", ["no JSON", "[]", "7", '{"n": 1}', '{"max_tokens": "x", "prompt": "a"}'])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(ValueError, match=r"in\.jsonl:2: "):
        FileLoad(path, 1).sessions()


def test_a_line_of_a_file_ends_at_its_newline_only(tmp_path: Path) -> None:
    """Python's own str.splitlines knows more ends, which JSON allows within a string."""
    odd, path = "a\u2028b\x85c\x1dd", tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{odd}{i}"}, ensure_ascii=False) + "\r\n" for i in range(2)))
    assert first(FileLoad(path, osl=9), 2) == [(Turn(f"{odd}{i}", 9),) for i in range(2)]
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"in\.jsonl:2: not a request: "):
        FileLoad(path, 1).sessions()


def test_bodies_of_a_second_turn() -> None:
    history, turn = ["one", "answer"], Turn("two", 5)
    chat = json.loads(APIS["chat"].body("m", turn, history, {}))
    assert chat["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "two"},
    ]
    assert chat["stream_options"] == {"include_usage": True}
    assert json.loads(APIS["responses"].body("m", turn, history, {}))["input"] == chat["messages"]
    assert json.loads(APIS["completions"].body("m", turn, history, {}))["prompt"] == "oneanswertwo"


def test_poisson_arrivals_have_the_rate_and_the_spread_of_such_a_process() -> None:
    offsets_s = np.array(Arrival(rate=20.0).offsets_s(5000, seed=1))
    gaps_s = np.diff(offsets_s)
    assert offsets_s[0] == 0
    assert gaps_s.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps_s.std() == pytest.approx(1 / 20, rel=0.1), "of an exponential distribution it equals the mean"


def test_bursts_keep_the_rate() -> None:
    offsets_s = Arrival(rate=20.0, burst=4).offsets_s(4001, seed=1)
    bursts = [list(group) for _, group in itertools.groupby(offsets_s)]
    assert {len(burst) for burst in bursts[:-1]} == {4}
    assert len(bursts[-1]) == 1
    assert offsets_s[-1] == pytest.approx(4000 / 20, rel=0.1)


def test_constant_and_closed_arrivals() -> None:
    assert Arrival(rate=4.0, constant=True).offsets_s(3, seed=1) == pytest.approx([0.0, 0.25, 0.5])
    assert Arrival(concurrency=2).offsets_s(3, seed=1) == [0.0, 0.0, 0.0]
    assert [Arrival(concurrency=7).share(index, 3).concurrency for index in range(3)] == [3, 2, 2]
