"""Anthropic's Messages API as a part of the server."""

from functools import partial

from oscine.api.common.errors import AnthropicError
from oscine.api.interface import Api
from oscine.api.openai import answers
from oscine.api.openapi import POST, QUESTION, Operation
from oscine.extensions.apis.anthropic.answer import AnthropicAnswer
from oscine.extensions.apis.anthropic.endpoint import AnthropicMessages, CountTokens
from oscine.extensions.apis.responses.api import responses_of


class AnthropicApi(Api):
    @property
    def operations(self) -> list[Operation]:
        post = partial(POST, error=AnthropicError)
        store = responses_of(self.service).kept.store
        asked = {"model": "any", "messages": QUESTION}
        return [
            post(
                "/v1/messages",
                AnthropicMessages(self.service, store),
                "Answer messages",
                answer=AnthropicAnswer,
                example={**asked, "max_tokens": 200},
            ),
            post(
                "/v1/messages/count_tokens",
                CountTokens(self.service, store),
                "Count tokens",
                answer=answers.InputTokens,
                example=asked,
            ),
        ]
