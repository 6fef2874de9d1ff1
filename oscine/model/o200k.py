"""The real gpt-oss vocabulary (o200k_harmony) without a checkpoint, rebuilt as tokenizer.json from oss-harmony.

For tests and for servers with random weights.
"""

import json
import os
from pathlib import Path
from typing import Any

from oscine.system.owned_folder import complete_file, open_file, opened, remove_parts

_FILE = "tokenizer.json"
NUM_RANKS = 199998  # ordinary tokens; special tokens follow
NUM_TOKENS = 201088  # the size of gpt-oss's embedding
SPECIAL_IDS = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}

_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def _byte_characters() -> list[str]:
    """The character of byte-level BPE for each of the 256 bytes: printable Latin-1 as itself, the others from U+0100
    on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()


def o200k_folder(cache: str | Path | None = None) -> Path:
    """A folder with the o200k_harmony tokenizer.json, written on the first call (seconds) below `cache`.

    `cache` is by default .cache/oscine in the user's home. A file that others may change is written anew. Raises
    ValueError when oss-harmony is not installed, or for a folder that cannot be used.
    """
    folder = Path(cache or Path.home() / ".cache" / "oscine") / "o200k_harmony"
    try:
        with opened(folder) as descriptor:
            if not _is_there(descriptor):
                _write(descriptor)
    except OSError as error:
        raise ValueError(f"{folder}: no place for the o200k_harmony vocabulary: {error}") from None
    return folder


def _is_there(folder: int) -> bool:
    """Whether the file was made by this user or root, and no other can change it."""
    try:
        os.close(open_file(folder, _FILE))
    except OSError:
        return False
    return True


def _write(folder: int) -> None:
    text = json.dumps(_tokenizer_json(_ranked_tokens()), ensure_ascii=False)
    remove_parts(folder)
    with complete_file(folder, _FILE) as file:  # another process may read or write the same file
        file.write(text.encode())


def _ranked_tokens() -> list[bytes]:
    """The bytes of every ordinary token, in rank order."""
    try:
        import openai_harmony
    except ImportError as error:
        raise ValueError("the o200k_harmony vocabulary needs the package oss-harmony") from error
    encoding = openai_harmony.load_harmony_encoding("HarmonyGptOss")._inner
    return [bytes(encoding.decode_bytes([rank])) for rank in range(NUM_RANKS)]


def _merges_of(tokens: list[bytes]) -> dict[bytes, tuple[bytes, bytes]]:
    """The two parts that BPE joins last to make each token: it merges by lowest rank until two are left.

    They are the only two smaller tokens that BPE, in text that has one behind the other, would leave as they are.
    """
    rank_of = {token: rank for rank, token in enumerate(tokens)}
    parts_of: dict[bytes, tuple[bytes, bytes]] = {}
    for rank, token in enumerate(tokens):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [pair for pair in cuts if rank_of.get(pair[0], rank) < rank and rank_of.get(pair[1], rank) < rank]
        if len(pairs) > 1:
            pairs = [pair for pair in pairs if _stay_apart(*pair, rank, rank_of, parts_of)]
        if pairs:
            (parts_of[token],) = pairs
    return parts_of


def _stay_apart(
    left: bytes, right: bytes, limit: int, rank_of: dict[bytes, int], parts_of: dict[bytes, tuple[bytes, bytes]]
) -> bool:
    """Whether BPE makes no token of the end of `left` and the beginning of `right`, by a rank below the limit.

    Undoes the merges on both sides of the cut, the last one first. Of two equal merges, BPE does the left one first.
    """
    while rank_of.get(left + right, limit) >= limit:
        left_rank, right_rank = rank_of[left], rank_of[right]
        if left_rank > right_rank and left in parts_of:
            left, limit = parts_of[left][1], left_rank
        elif right in parts_of:
            right, limit = parts_of[right][0], right_rank + 1
        elif left in parts_of:
            left, limit = parts_of[left][1], left_rank
        else:
            return True
    return False


def _tokenizer_json(tokens: list[bytes]) -> dict[str, Any]:
    characters = dict(enumerate(BYTE_CHARACTERS))
    spelled = {token: token.decode("latin-1").translate(characters) for token in tokens}
    name_of = {token_id: name for name, token_id in SPECIAL_IDS.items()}
    names = [(i, name_of.get(i, f"<|reserved_{i}|>")) for i in range(NUM_RANKS, NUM_TOKENS)]
    merges = _merges_of(tokens)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": name, **flags} for i, name in names],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {spelled[token]: rank for rank, token in enumerate(tokens)},
            "merges": [[spelled[left], spelled[right]] for left, right in merges.values()],
        },
    }
