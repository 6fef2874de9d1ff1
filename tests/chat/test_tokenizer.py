import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from openai_harmony import HarmonyEncoding

from oscine.chat import tokenizer
from oscine.chat.tokenizer import SPECIAL_TOKENS, Tokenizer
from oscine.model.o200k import NUM_RANKS, SPECIAL_IDS, o200k_folder
from tests.byte_tokenizer import write_byte_tokenizer

# Plain text, and text that looks like a marker.
texts = st.lists(st.one_of(st.text(max_size=20), st.sampled_from(sorted(SPECIAL_IDS)))).map("".join)


@pytest.mark.long
@settings(max_examples=200)
@given(texts)
def test_encodes_like_the_oracle(o200k: Tokenizer, oracle: HarmonyEncoding, text: str) -> None:
    ids = o200k.encode(text)
    assert ids == oracle.encode(text, disallowed_special=())
    assert o200k.decode(ids) == text


@pytest.mark.long
@settings(max_examples=200)
@given(texts)
def test_text_never_becomes_a_special_id(byte_tokenizer: Tokenizer, text: str) -> None:
    ids = byte_tokenizer.encode(text)
    assert not any(map(byte_tokenizer.is_special, ids))
    assert b"".join(map(byte_tokenizer.token_bytes, ids)) == text.encode()


def test_bytes_of_every_token_are_the_oracles(o200k: Tokenizer, oracle: HarmonyEncoding) -> None:
    for token_id in [*range(0, NUM_RANKS, 97), *range(NUM_RANKS, o200k.vocab_size)]:
        assert o200k.token_bytes(token_id) == bytes(oracle._inner.decode_bytes([token_id]))
        assert o200k.is_special(token_id) == oracle.is_special_token(token_id)


def test_special_ids_are_found_by_name(o200k: Tokenizer, byte_tokenizer: Tokenizer) -> None:
    for attribute, content in SPECIAL_TOKENS.items():
        assert getattr(o200k, attribute) == SPECIAL_IDS[content]
        assert byte_tokenizer.token_bytes(getattr(byte_tokenizer, attribute)) == content.encode()
    assert (o200k.vocab_size, byte_tokenizer.vocab_size) == (201088, 256 + len(SPECIAL_TOKENS))
    assert (o200k.max_prompt_id, byte_tokenizer.max_prompt_id) == (SPECIAL_IDS["<|call|>"], 255 + len(SPECIAL_TOKENS))


@pytest.mark.parametrize("token_id", [201088, 1 << 40, -1])
def test_ids_outside_of_the_vocabulary_have_no_text(o200k: Tokenizer, token_id: int) -> None:
    assert o200k.token_bytes(token_id) == b""
    assert o200k.is_special(token_id)
    assert o200k.decode([0, token_id, 0]) == "!!"


def test_lone_surrogates_are_replaced(o200k: Tokenizer) -> None:
    assert o200k.decode(o200k.encode("a\ud800b")) == "a\ufffdb"
    assert o200k.decode(o200k.encode("\ud83d\ude00")) == "😀"


@pytest.mark.long
def test_other_threads_go_on_while_a_long_text_is_encoded(o200k: Tokenizer) -> None:
    encoding = threading.Thread(target=o200k.encode, args=("word " * 400_000,))
    encoding.start()
    turns = 0
    while encoding.is_alive():
        encoding.join(timeout=0.001)
        turns += 1
    assert turns > 20  # two or three if the encoder kept the interpreter to itself


def test_a_missing_special_token_is_named(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path, [name for name in SPECIAL_TOKENS.values() if name != "<|call|>"])
    with pytest.raises(ValueError, match=r"tokenizer\.json has no special token <\|call\|>"):
        Tokenizer(folder)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer file"):
        Tokenizer(tmp_path)


def test_a_vocabulary_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path, sorted(SPECIAL_TOKENS.values()), more={"▁the": 300})
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a byte-level vocabulary: a token has '▁'"):
        Tokenizer(folder)


@pytest.mark.long
def test_o200k_is_rebuilt_the_same_from_scratch(tmp_path: Path, o200k: Tokenizer) -> None:
    rebuilt = o200k_folder(tmp_path) / "tokenizer.json"
    assert rebuilt.read_bytes() == o200k.path.read_bytes()


# What the patterns of pre-tokenizers look ahead for: contractions, runs of spaces, digits and signs, letters in cases.
tricky = st.lists(
    st.sampled_from(
        [*"a1 \n\r\t'!/\u00e9\u6f22\U0001f600A", "'ll", "'RE", " w", "  ", "99", "aBc", "<|end|>", "\ud83d", "\ude00"]
    ),
    max_size=60,
).map("".join)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tricky, st.integers(4, 24))
@example("a" * 100 + " b" * 30, 8)  # a word that is longer than a slice
def test_a_text_in_slices_has_the_ids_of_the_whole(
    o200k: Tokenizer, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, text: str, size: int
) -> None:
    for vocabulary in (o200k, byte_tokenizer):
        monkeypatch.setattr(tokenizer, "_SLICE", len(text))
        whole = vocabulary.encode(text)
        monkeypatch.setattr(tokenizer, "_SLICE", size)
        assert vocabulary.encode(text) == whole


def test_no_more_than_a_slice_is_encoded_at_a_time(o200k: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = _watched(o200k, monkeypatch)
    monkeypatch.setattr(tokenizer, "_SLICE", 64)
    o200k.encode("We'll see what's 12345.67; " * 20)
    assert max(slices) <= 64
    slices.clear()
    o200k.encode(f"{'a' * 100} {'word ' * 200}")  # a long word makes one slice longer
    assert sorted({*slices})[-2:] == [64, 512]


def test_tokens_that_plain_text_may_contain_keep_a_text_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_byte_tokenizer(tmp_path, sorted(SPECIAL_TOKENS.values())) / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["use_regex"] = True
    content["added_tokens"].append({**content["added_tokens"][0], "content": "b c d", "special": False})
    path.write_text(json.dumps(content))
    vocabulary = Tokenizer(tmp_path)
    whole = vocabulary.encode("a b c d e")
    assert len(whole) == 5
    monkeypatch.setattr(tokenizer, "_SLICE", 6)
    assert vocabulary.encode("a b c d e") == whole


def _watched(vocabulary: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the length of each text that the library encodes."""
    lengths: list[int] = []
    inner = vocabulary._inner

    class Watched:
        def __getattr__(self, name: str) -> Any:
            method = getattr(inner, name)
            if not name.startswith("encode_batch"):
                return method

            def encode(texts: list[str], **options: bool) -> Any:
                lengths.append(len(texts[0]))
                return method(texts, **options)

            return encode

    monkeypatch.setattr(vocabulary, "_inner", Watched())
    return lengths


def test_a_count_needs_a_slice_of_a_text_at_a_time(o200k: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "We'll see what's 12345.67; \n\n\t caf\u00e9 \u6f22\u5b57 \U0001f600 'RE  \ud800 end" * 9
    count = len(o200k.encode(text))
    slices = _watched(o200k, monkeypatch)
    monkeypatch.setattr(tokenizer, "_SLICE", 64)
    assert o200k.count([text]) == count
    assert max(slices) <= 64


@pytest.mark.parametrize("text", ["", "a b" * 100, "caf\u00e9 " * 50, "1" * 200])
def test_a_count_is_that_of_the_ids(
    o200k: Tokenizer, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(tokenizer, "_SLICE", 16)
    for vocabulary in (o200k, byte_tokenizer):
        assert vocabulary.count([text]) == len(vocabulary.encode(text))


def test_a_word_longer_than_a_slice_is_counted_in_pieces(o200k: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_SLICE", 100)
    text = "abcdefghij" * 300
    count = len(o200k.encode(text))
    assert count <= o200k.count([text]) <= count + 2 * 30
