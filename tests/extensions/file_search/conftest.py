"""Fixtures of the rooms whose parts these tests use."""

from tests.api.conftest import tokenizer

__all__ = ["tokenizer"]
