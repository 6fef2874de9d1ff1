"""/v1/chat/completions."""

from starlette.types import Receive, Scope, Send

from oscine.api.openai.chat_answer import ChatAnswer, reasoning_fields
from oscine.api.openai.endpoint import Endpoint
from oscine.api.serving.call import Call
from oscine.api.serving.logprobs import ContentLogprobs
from oscine.api.serving.schemas import ChatCompletionRequest
from oscine.api.turns.chat import chat_turns, top_logprobs
from oscine.api.turns.generation import Generation


class ChatCompletions(Endpoint[ChatCompletionRequest]):
    async def answer(self, call: Call[ChatCompletionRequest], scope: Scope, receive: Receive, send: Send) -> None:
        body = call.body
        turns = await chat_turns(self.service, call)
        logprobs = [ContentLogprobs(call.model.tokenizer, top_logprobs(body), turn.logprobs) for turn in turns]
        fields = reasoning_fields(body, self.service.config.server.reasoning_field)
        answer = ChatAnswer(turns, logprobs, call.name, fields, body)
        generation = Generation(call, answer.choices, "chat_completions")
        await self.generate(generation, answer, scope, receive, send, stream=body.stream)
