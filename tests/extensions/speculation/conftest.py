"""Fixtures of the rooms whose parts these tests use."""

from tests.api.conftest import scripted, tokenizer
from tests.executor.conftest import make_executor, replayed

__all__ = ["make_executor", "replayed", "scripted", "tokenizer"]
