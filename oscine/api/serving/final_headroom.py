"""Room for the answer: when reasoning has used up a budget but for a last part, the final message is forced.

Knows token ids and the arithmetic of the budget; what is reasoning, the choice knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oscine.api.serving.generation import engine_request
from oscine.api.serving.prompt import Prompts
from oscine.types import GenerationOutput, GenerationRequest


@dataclass(frozen=True)
class FinalHeadroom:
    """Of one sequence. `tokens` of its budget are kept for the answer."""

    prompts: Prompts
    request: GenerationRequest
    tokens: int
    max_model_len: int
    grammar: str | None  # of what the final message says

    @property
    def begins_after(self) -> int:
        """Generated tokens from which on the answer must have begun."""
        return self.request.sampling.max_tokens - self.tokens

    def forced(self, generated: Sequence[int]) -> GenerationRequest | None:
        """The request that answers after all; None where the context has no room for it."""
        prompt = self.prompts.into_final([*self.request.prompt_token_ids, *generated])
        left = min(self.request.sampling.max_tokens - len(generated), self.max_model_len - len(prompt))
        if left < 1:
            return None
        sampling = replace(self.request.sampling, max_tokens=left, min_tokens=0, grammar=self.grammar)
        return engine_request(prompt, sampling, self.request.priority, self.request.cache_salt)


def usual_headroom(setting: int, max_tokens: int) -> int:
    """Of a request that asks for none: the server's setting gives way where the budget is small."""
    return min(setting, max_tokens // 2)


def cut(output: GenerationOutput, count: int) -> tuple[GenerationOutput, GenerationOutput]:
    """The first `count` tokens of some news, and the rest with how it ended."""
    ids, logprobs = output.token_ids, output.logprobs
    before = replace(
        output, token_ids=ids[:count], logprobs=logprobs and logprobs[:count], finish_reason=None, error=None
    )
    return before, replace(output, token_ids=ids[count:], logprobs=logprobs and logprobs[count:])
