"""Oscine serves OpenAI's gpt-oss models. Importing the package imports nothing heavy."""

__version__ = "0.1.0"
