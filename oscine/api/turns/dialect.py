"""What differs between APIs whose requests become the same turns. Each API declares its own."""

from dataclasses import dataclass

from oscine.chat.tools import LONGEST_NAME


@dataclass(frozen=True, slots=True)
class Dialect:
    longest_name: int = LONGEST_NAME  # characters of a function's name
    separator: str = "\n\n"  # joins the texts of several messages of one kind
    prompt: str = "messages"  # the parameter with the conversation or the text
    limit: str | None = None  # the parameter with the most tokens to generate; None: as in chat completions
    clipped: bool = False  # a limit beyond the context ends there, and is no error


CHAT = Dialect(longest_name=64)
TEXT = Dialect(prompt="prompt", limit="max_tokens")
