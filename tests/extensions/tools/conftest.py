"""Tokenizers of the tests of chat."""

from tests.chat.conftest import byte_tokenizer, o200k, oracle, renderer

__all__ = ["byte_tokenizer", "o200k", "oracle", "renderer"]
