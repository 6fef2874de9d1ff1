"""Fixtures of the rooms whose parts these tests use."""

from tests.api.conftest import scripted, tokenizer

__all__ = ["scripted", "tokenizer"]
