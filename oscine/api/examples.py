"""A request for each endpoint with a body, as /openapi.json shows it. A test sends them all."""

from typing import Any

from oscine.api.anthropic import schemas as anthropic_schemas
from oscine.api.responses.context import CompactRequest, InputTokensRequest
from oscine.api.responses.schemas import ResponseRequest
from oscine.api.serving import schemas

_QUESTION = [{"role": "user", "content": "What is 27 + 58?"}]

EXAMPLES: dict[type, dict[str, Any]] = {
    schemas.ChatCompletionRequest: {"messages": _QUESTION, "max_completion_tokens": 200},
    schemas.CompletionRequest: {"prompt": "Once upon a time", "max_tokens": 16},
    anthropic_schemas.MessagesRequest: {"model": "any", "max_tokens": 200, "messages": _QUESTION},
    anthropic_schemas.CountTokensRequest: {"model": "any", "messages": _QUESTION},
    ResponseRequest: {"input": "What is 27 + 58?", "max_output_tokens": 200},
    InputTokensRequest: {"input": "What is 27 + 58?"},
    CompactRequest: {"model": "any", "input": "What is 27 + 58?"},
    schemas.TokenizeRequest: {"messages": _QUESTION},
    schemas.DetokenizeRequest: {"tokens": [72, 105]},
}
