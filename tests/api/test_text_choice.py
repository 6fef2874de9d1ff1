"""A raw text choice does not depend on how the engine's tokens are divided into outputs."""

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from oscine.api.openai.answers import CompletionChoice
from oscine.api.openai.text_answer import TextAnswer
from oscine.api.serving.schemas import CompletionRequest
from oscine.api.turns.progress import Turn
from oscine.api.turns.text import TextParser
from oscine.chat.tokenizer import Tokenizer
from oscine.types import GenerationOutput, GenerationRequest, SamplingParams, TokenLogprobs

PROMPT = [*b"Hi"]


def play(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], *, stop: list[str], echo: bool, skip: bool
) -> tuple[CompletionChoice, int]:
    """The whole choice, and how many tokens it counts."""
    no_model: Any = None  # it is for turns that go on
    request = GenerationRequest("r", PROMPT, SamplingParams(max_tokens=len(ids)))
    turn = Turn(no_model, request, TextParser(tokenizer, stop, skip_special=skip))
    body = CompletionRequest(prompt="Hi", echo=echo, skip_special_tokens=skip, logprobs=0)
    (choice,) = TextAnswer([turn], 1, "m", body, tokenizer).choices
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    for start, end in pairwise(edges):
        piece = ids[start:end]
        logprobs = [TokenLogprobs(i, -1.0, ()) for i in piece]
        of_prompt = [TokenLogprobs(PROMPT[1], -2.0, ())] if start == 0 else None
        finish = "stop" if end == len(ids) else None
        output = GenerationOutput("r", piece, logprobs, of_prompt, finish)  # type: ignore[arg-type]
        assert choice.encode(turn.feed(output)) == b""
        if turn.finish_reason is not None:
            break
    return choice.answer(), turn.num_tokens


@given(
    st.lists(st.integers(0, 270), min_size=1, max_size=20),
    st.lists(st.integers(0, 20)),
    st.lists(st.sampled_from(["a", "ab", "\u00e9", "\ufffd"]), max_size=2),
    st.booleans(),
    st.booleans(),
)
def test_pieces_join_to_the_whole(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], stop: list[str], echo: bool, skip: bool
) -> None:
    once, num_tokens = play(tokenizer, ids, [], stop=stop, echo=echo, skip=skip)
    pieces = play(tokenizer, ids, cuts, stop=stop, echo=echo, skip=skip)
    assert pieces == (once, num_tokens)
    assert once.logprobs is not None
    assert len(once.logprobs.tokens) == num_tokens + (len(PROMPT) if echo else 0)
    shown = [i for i in ids if not tokenizer.is_special(i)] if skip else ids
    plain = tokenizer.decode(shown)
    ends = [(plain.find(s) + len(s), -len(s)) for s in stop if s in plain]
    end, back = min(ends, default=(len(plain), 0))
    assert once.text == ("Hi" if echo else "") + plain[: end + back]
    assert once.finish_reason == "stop"
