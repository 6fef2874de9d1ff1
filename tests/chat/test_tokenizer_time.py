"""No run of one kind of character makes a text slow to encode."""

import time
from pathlib import Path

import pytest

from oscine.chat.tokenizer import Tokenizer

NANO = Path(__file__).parents[2] / "oscine" / "model" / "nano"
RUNS = {
    "spaces": " ",
    "tabs": "\t",
    "line breaks": "\n",
    "spaces and line breaks": "  \n",
    "small letters": "a",
    "capitals": "A",
    "mixed case": "aA",
    "digits": "7",
    "signs": "!",
    "quotes": "'s",
    "words": "word ",
    "marks": "e\u0301\u0301",
    "modifier letters": "\u02b0a",
    "ideographs": "\u4e2d",
    "emoji": "\U0001f642",
    "other spaces": "\u00a0\u2028",
    "special tokens": "<|start|>",
}


@pytest.fixture(scope="module")
def nano() -> Tokenizer:
    return Tokenizer(NANO)


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ["o200k", "nano"])
def test_a_text_takes_time_in_proportion_to_its_length(name: str, run: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)

    def seconds(length: int) -> float:
        """Of the processor, the least of a few."""
        text = (RUNS[run] * length)[:length]
        took = []
        for _ in range(3):
            began = time.process_time()
            tokenizer.encode(text)
            took.append(time.process_time() - began)
        return min(took)

    assert seconds(32_000) < 32 * seconds(4_000) + 0.1  # eight times, were it not for noise; the square is 64 times
