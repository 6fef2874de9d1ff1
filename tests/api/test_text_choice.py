"""A raw text choice does not depend on how the engine's tokens are divided into outputs."""

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.api.openai.text_choice import TextChoice
from oscine.chat.tokenizer import Tokenizer
from oscine.types import GenerationOutput, TokenLogprobs

PROMPT = [*b"Hi"]


def play(tokenizer: Tokenizer, ids: list[int], cuts: list[int], **options: Any) -> tuple[str, TextChoice]:
    choice = TextChoice(tokenizer, PROMPT, **options)
    text = ""
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    for start, end in pairwise(edges):
        piece = ids[start:end]
        logprobs = [TokenLogprobs(i, -1.0, ()) for i in piece]
        of_prompt = [TokenLogprobs(PROMPT[1], -2.0, ())] if start == 0 else None
        finish = "stop" if end == len(ids) else None
        text += choice.feed(GenerationOutput("r", piece, logprobs, of_prompt, finish))  # type: ignore[arg-type]
        if choice.finish_reason is not None:
            break
    return text, choice


@settings(deadline=None)
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
    options: dict[str, Any] = {"stop": stop, "echo": echo, "skip_special_tokens": skip, "top_logprobs": 0}
    whole, once = play(tokenizer, ids, [], **options)
    text, choice = play(tokenizer, ids, cuts, **options)
    assert text == whole
    assert choice.num_tokens == once.num_tokens
    assert choice.take_logprobs() == once.take_logprobs()
    shown = [i for i in ids if not tokenizer.is_special(i)] if skip else ids
    plain = tokenizer.decode(shown)
    ends = [(plain.find(s) + len(s), -len(s)) for s in stop if s in plain]
    end, back = min(ends, default=(len(plain), 0))
    assert whole == ("Hi" if echo else "") + plain[: end + back]
    assert choice.finish_reason == "stop"
