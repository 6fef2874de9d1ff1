"""/v1/completions: raw text or token ids in, raw text out."""

from starlette.types import Receive, Scope, Send

from oscine.api.common.errors import unsupported
from oscine.api.openai.endpoint import Endpoint
from oscine.api.openai.text_answer import TextAnswer
from oscine.api.serving.call import Call
from oscine.api.serving.schemas import CompletionRequest
from oscine.api.turns.generation import Generation
from oscine.api.turns.text import DEFAULT_MAX_TOKENS, text_turns


class Completions(Endpoint[CompletionRequest]):
    async def answer(self, call: Call[CompletionRequest], scope: Scope, receive: Receive, send: Send) -> None:
        body = call.body
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise unsupported("best_of", "other than 'n' it is not supported")
        turns = await text_turns(call, DEFAULT_MAX_TOKENS)
        num_prompts = len(turns) // (body.n or 1)
        answer = TextAnswer(turns, num_prompts, call.name, body, call.model.tokenizer)
        await self.generate(Generation(call, answer.choices), answer, scope, receive, send, stream=body.stream)
