"""A choice of an answer as it is sent: how it grows is the choice's own affair, what is said of it the sender's.

Knows nothing of formats.
"""

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from oscine.api.http.sse import Write
from oscine.types import GenerationOutput, GenerationRequest


class GrowingChoice(Protocol):
    """See oscine.api.serving.generation.Choice."""

    num_prompt_tokens: int
    num_tokens: int
    finish_reason: str | None

    @property
    def interrupted(self) -> bool: ...

    def continuation(self) -> GenerationRequest | None: ...


C = TypeVar("C", bound=GrowingChoice)


class SentChoice(ABC, Generic[C]):
    """A Choice of oscine.api.serving.generation."""

    def __init__(self, choice: C) -> None:
        self.choice = choice
        self.num_prompt_tokens = choice.num_prompt_tokens

    @abstractmethod
    def feed(self, output: GenerationOutput) -> bytes:
        """Lets the choice grow. Returns the events to send, when the answer is streamed."""

    @property
    def finish_reason(self) -> str | None:
        return self.choice.finish_reason

    @property
    def num_tokens(self) -> int:
        return self.choice.num_tokens

    @property
    def interrupted(self) -> bool:
        return self.choice.interrupted

    async def continuation(self, write: Write | None) -> GenerationRequest | None:
        return self.choice.continuation()
