"""Oscine serves OpenAI's gpt-oss models. Importing the package imports nothing heavy."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """LLM and AsyncLLM, imported when they are first used. Their types are in __init__.pyi."""
    if name in ("LLM", "AsyncLLM"):
        return getattr(importlib.import_module("oscine.llm"), name)
    raise AttributeError(f"module 'oscine' has no attribute {name!r}")
