"""Ollama's API as a part of the server."""

from functools import partial

from oscine.api.common.errors import ErrorText
from oscine.api.http.sse import NDJSON
from oscine.api.interface import Api
from oscine.api.openai import answers
from oscine.api.openapi import DELETE, GET, POST, QUESTION, Operation
from oscine.extensions.apis.ollama.endpoint import OllamaChat, OllamaGenerate
from oscine.extensions.apis.ollama.models import OllamaModelList, change, embed, running
from oscine.extensions.apis.ollama.schemas import (
    OllamaChatAnswer,
    OllamaGenerateAnswer,
    OllamaLoadedModels,
    OllamaModelInfo,
    OllamaModelRequest,
    OllamaModels,
    OllamaPullRequest,
    OllamaStatus,
)


class OllamaApi(Api):
    front = staticmethod(running)

    @property
    def operations(self) -> list[Operation]:
        post, get = partial(POST, error=ErrorText, events=NDJSON, undeclared=True), partial(GET, error=ErrorText)
        one = {"model": "any"}
        talk, text = (
            {**one, "messages": QUESTION, "stream": False},
            {**one, "prompt": "What is 27 + 58?", "stream": False},
        )
        chat, generate, models = OllamaChat(self.service), OllamaGenerate(self.service), OllamaModelList(self.service)
        refused = partial(post, summary="Not supported", other={"400": ErrorText})
        return [
            post("/api/chat", chat, "Answer a conversation", answer=OllamaChatAnswer, example=talk),
            post("/api/generate", generate, "Answer a prompt", answer=OllamaGenerateAnswer, example=text),
            get("/api/tags", models.tags, "List models", answer=OllamaModels),
            get("/api/ps", models.ps, "List models that are ready", answer=OllamaLoadedModels),
            get("/api/version", models.version, "Version of Ollama's API", answer=answers.Version, open=True),
            post("/api/show", models.show, "One model", body=OllamaModelRequest, answer=OllamaModelInfo, example=one),
            post(
                "/api/pull",
                models.pull,
                "Download a model, or learn that it is served",
                body=OllamaPullRequest,
                answer=OllamaStatus,
                example={**one, "stream": False},
            ),
            *(refused(f"/api/{name}", embed) for name in ("embed", "embeddings")),
            *(refused(f"/api/{name}", change) for name in ("create", "copy", "push")),
            self._delete(models),
        ]

    def _delete(self, models: OllamaModelList) -> Operation:
        path, other = "/api/delete", {"400": ErrorText}
        if self.service.demand is None:
            return DELETE(path, change, "Not supported", error=ErrorText, other=other)
        return DELETE(
            path,
            models.delete,
            "Remove a model and its files",
            body=OllamaModelRequest,
            undeclared=True,
            answer="text/plain",
            error=ErrorText,
            other=other,
            example={"model": "any"},
            admin=True,
        )
