"""Reads tokenizer.json as transformers uses it: truncation, padding and dropout that it stores have no effect.

A panic of the library in Rust is no Exception in Python. Here it becomes a ValueError.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from oscine.system.model_files import MAX_TOKENIZER_BYTES, read_file, shown

# Each added token is one. gpt-oss has 1,090, and grammars take a time that grows with the square.
_MAX_OBJECTS = 1 << 14
_MAX_ITEMS = 1 << 21  # tokens, and parts of merges; gpt-oss has 1.1 million


def read_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, str]:
    """The tokenizer, and its JSON for other readers. Raises ValueError naming the file."""
    data = read_text(path)
    with library_errors(f"{path} is not a tokenizer file"):
        tokenizer, text = tokenizers.Tokenizer.from_buffer(data), data.decode()
        dropout = getattr(tokenizer.model, "dropout", None)  # of BPE
        if (dropout, tokenizer.truncation, tokenizer.padding) != (None, None, None):
            tokenizer.no_truncation()
            tokenizer.no_padding()
            if dropout is not None:
                tokenizer.model.dropout = None
            text = tokenizer.to_str()
    if not tokenizer.get_vocab_size():
        raise ValueError(f"{path}: has no tokens")
    return tokenizer, text


def read_text(path: Path) -> bytes:
    """The JSON as it is. Raises ValueError for more objects or items than a tokenizer has."""
    data = read_file(path, MAX_TOKENIZER_BYTES)
    if data.count(b"{") > _MAX_OBJECTS:
        raise ValueError(f"{path}: has more than {_MAX_OBJECTS} objects, too many for the added tokens of a model")
    if data.count(b",") > _MAX_ITEMS:
        raise ValueError(f"{path}: has more than {_MAX_ITEMS} items, too many for the tokens and merges of a model")
    return data


@contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Raises ValueError, in one line, for any error or panic of a library in Rust. They raise bare Exception."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or is_panic(error):
            raise ValueError(f"{message}: {shown(error)}") from None
        raise


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic in Rust. Its class cannot be imported."""
    return type(error).__name__ == "PanicException"
