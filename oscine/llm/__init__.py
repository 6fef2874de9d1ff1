"""The model in a Python program: `from oscine import LLM`. docs/python.md has examples."""

from oscine.llm.asynchronous import AsyncLLM
from oscine.llm.blocking import LLM
from oscine.llm.errors import LostEngineError, RequestError
from oscine.llm.results import ChatResult, TextResult

__all__ = ["LLM", "AsyncLLM", "ChatResult", "LostEngineError", "RequestError", "TextResult"]
