import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.chat.detokenizer import Detokenizer
from oscine.chat.tokenizer import Tokenizer

byte_ids = st.integers(0, 255)  # of the byte tokenizer


@pytest.mark.long
@settings(max_examples=300)
@given(
    data=st.one_of(st.lists(byte_ids), st.text().map(lambda text: list(text.encode()))),
    sizes=st.lists(st.integers(1, 5), min_size=1),
)
def test_any_bytes_in_any_pieces_decode_as_one(byte_tokenizer: Tokenizer, data: list[int], sizes: list[int]) -> None:
    detokenizer = Detokenizer(byte_tokenizer)
    text, rest, turn = "", data, 0
    while rest:
        size = sizes[turn % len(sizes)]
        text += detokenizer.feed(rest[:size])
        rest, turn = rest[size:], turn + 1
        whole = bytes(data[: len(data) - len(rest)]).decode(errors="replace")
        assert whole.startswith(text.removesuffix("\ufffd"))
        assert len(whole) - len(text) <= 3  # only an unfinished character is held back
    assert text + detokenizer.finish() == bytes(data).decode(errors="replace")


def test_characters_are_whole_and_invalid_bytes_do_not_stall(byte_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_tokenizer)
    assert [detokenizer.add(byte) for byte in "é€".encode()] == ["", "é", "", "", "€"]
    assert detokenizer.feed([0xFF, 0x61]) == "\ufffda"
    assert detokenizer.feed([0xE2, 0x61]) == "\ufffda"
    assert detokenizer.feed([0xE2]) + detokenizer.finish() == "\ufffd"


def test_special_and_unknown_ids_are_skipped(byte_tokenizer: Tokenizer) -> None:
    first, second = "é".encode()
    ids = [first, byte_tokenizer.end, 201088, second, byte_tokenizer.start]
    assert Detokenizer(byte_tokenizer).feed(ids) == "é"
