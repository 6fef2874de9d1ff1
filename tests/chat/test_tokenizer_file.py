"""What tokenizer.json stores beside the vocabulary, and how it is written."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from oscine.chat.tokenizer import SPECIAL_TOKENS, Tokenizer
from oscine.model import o200k
from oscine.model.tokenizer_file import read_tokenizer
from tests.byte_tokenizer import write_byte_tokenizer


def stored(folder: Path, **more: Any) -> Path:
    """A tokenizer of bytes and "ab", with more fields."""
    path = write_byte_tokenizer(folder, sorted(SPECIAL_TOKENS.values()), more={"ab": 300}) / "tokenizer.json"
    values = json.loads(path.read_text()) | more
    values["model"] |= {"merges": [["a", "b"]]} | values.pop("of_model", {})
    path.write_text(json.dumps(values))
    return path


STORED: list[dict[str, Any]] = [
    {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
    {
        "padding": {
            "strategy": {"Fixed": 90},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        }
    },
    {"of_model": {"dropout": 1.0}},
]


@pytest.mark.parametrize("more", STORED, ids=["truncation", "padding", "dropout"])
def test_stored_truncation_padding_and_dropout_have_no_effect(tmp_path: Path, more: dict[str, Any]) -> None:
    """Neither for prompts, nor where the other readers of the file get it."""
    path = stored(tmp_path, **more)
    assert Tokenizer(tmp_path).encode("abab" * 20) == [300] * 40
    tokenizer, text = read_tokenizer(path)
    assert tokenizer.encode("abab" * 20, add_special_tokens=False).ids == [300] * 40
    values = json.loads(text)
    assert (values["truncation"], values["padding"], values["model"]["dropout"]) == (None, None, None)


def test_a_tokenizer_without_stored_options_is_passed_on_as_it_is(tmp_path: Path) -> None:
    path = stored(tmp_path)
    assert read_tokenizer(path)[1] == path.read_text()


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = stored(tmp_path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert Tokenizer(tmp_path).encode("ab") == [300]
    path.write_text(path.read_text("utf-8-sig"), "utf-16")
    with pytest.raises(ValueError, match=r"tokenizer\.json: must be UTF-8, not UTF-16$"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"added_tokens": [{}] * 20_000}, "has more than 16384 objects, too many for the added tokens of a model"),
        ({"of_model": {"merges": [["a", "b"]] * 1_100_000}}, "has more than 2097152 items, too many for the tokens"),
    ],
)
def test_more_tokens_than_a_model_has_are_not_read(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"tokenizer\.json: {said}"):
        read_tokenizer(stored(tmp_path, **change))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary takes seconds to make."""
    monkeypatch.setattr(o200k, "_ranked_tokens", list)
    monkeypatch.setattr(o200k, "_tokenizer_json", lambda tokens: {"made": True})


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("planted", ["writable by all", "a link", "a pipe"])
def test_a_planted_vocabulary_is_not_used(tmp_path: Path, planted: str) -> None:
    path = o200k.o200k_folder(tmp_path) / "tokenizer.json"
    path.unlink()
    if planted == "writable by all":
        path.write_text("{}")
        path.chmod(0o666)
    elif planted == "a link":
        (tmp_path / "other").write_text("{}")
        path.symlink_to(tmp_path / "other")
    else:
        os.mkfifo(path)
    assert o200k.o200k_folder(tmp_path) == path.parent
    assert (path.is_symlink(), path.read_text()) == (False, '{"made": true}')


@pytest.mark.usefixtures("quick")
def test_a_vocabulary_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    path = o200k.o200k_folder(tmp_path) / "tokenizer.json"
    path.write_text("kept")
    assert (o200k.o200k_folder(tmp_path) / "tokenizer.json").read_text() == "kept"


@pytest.mark.usefixtures("quick")
def test_a_folder_that_everyone_may_change_is_one_line(tmp_path: Path) -> None:
    o200k.o200k_folder(tmp_path).chmod(0o777)
    with pytest.raises(
        ValueError, match="o200k_harmony: no place for the o200k_harmony vocabulary: every user may writ"
    ):
        o200k.o200k_folder(tmp_path)
