"""/tokenize and /detokenize: the served model's own vocabulary, for texts and for whole conversations."""

from starlette.requests import Request
from starlette.responses import Response

from oscine.api.common.errors import invalid
from oscine.api.common.keys import Caller
from oscine.api.common.work import run_in_thread
from oscine.api.http.body import json_response, read_body
from oscine.api.openai.answers import Text, Tokens
from oscine.api.serving.sampling import check_ids
from oscine.api.serving.schemas import ChatCompletionRequest, DetokenizeRequest, TokenizeRequest, decode
from oscine.api.serving.service import Service
from oscine.api.turns.conversation import conversation


class Tokenize:
    def __init__(self, service: Service) -> None:
        self.service = service

    async def tokenize(self, request: Request) -> Response:
        """{"tokens", "count", "max_model_len"} and, if asked for, "token_strs"."""
        received = await read_body(request, self.service.config.server.max_body_bytes)
        body = await decode(received, TokenizeRequest, request.scope)
        _, model = self.service.find(body.model)
        async with self.service.using(model):
            ready = model.ready()
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either 'prompt' or 'messages'")
        if body.prompt is not None:
            ids = await ready.prompts.tokenize(body.prompt)
        else:
            chat = await decode(received, ChatCompletionRequest, request.scope)
            talk = await run_in_thread(lambda: conversation(chat, self.service.date), len(received))
            ids = await ready.prompts.render(
                self.service.reasoning.restore(Caller.of(request.scope).name, talk), len(received)
            )
            if body.add_generation_prompt is False:
                del ids[-1 - ids[::-1].index(ready.tokenizer.start) :]
        answer = Tokens(ids, len(ids), ready.info.max_model_len)
        if body.return_token_strs:
            answer.token_strs = await ready.prompts.decode_each(ids)
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        """{"prompt"}: special tokens by name, invalid UTF-8 as U+FFFD."""
        received = await read_body(request, self.service.config.server.max_body_bytes)
        body = await decode(received, DetokenizeRequest, request.scope)
        _, model = self.service.find(body.model)
        async with self.service.using(model):
            ready = model.ready()
        await run_in_thread(lambda: check_ids("tokens", body.tokens, ready.info.vocab_size), len(received))
        text = await ready.prompts.decode(body.tokens)
        return json_response(Text(text))
