"""Lists and descriptions of models in Ollama's format, and errors for operations that are not supported."""

import hashlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from oscine.api.common.errors import APIError, ErrorText
from oscine.api.http.body import json_response, read_body
from oscine.api.http.sse import NDJSON
from oscine.api.openai.answers import Version
from oscine.api.serving.names import ollama_name
from oscine.api.serving.schemas import decode
from oscine.api.serving.served_model import PullProgress, ServedModel
from oscine.api.serving.service import Service
from oscine.extensions.apis.ollama.answer import line, timestamp
from oscine.extensions.apis.ollama.endpoint import find
from oscine.extensions.apis.ollama.schemas import (
    OllamaDetails,
    OllamaLoadedModel,
    OllamaLoadedModels,
    OllamaModel,
    OllamaModelInfo,
    OllamaModelRequest,
    OllamaModels,
    OllamaPullRequest,
    OllamaStatus,
)
from oscine.types import EngineInfo, ModelSize

VERSION = "0.32.15"  # the version of Ollama whose API this is; clients refuse to talk to an older one
CAPABILITIES = ["completion", "tools", "thinking"]
_NEVER = "2318-01-01T00:00:00Z"  # when a loaded model is unloaded
_TEMPLATE = "{{ .System }}{{ .Tools }}{{ .Messages }}"  # the parts of a prompt; no template can express harmony


async def running(request: Request) -> Response:
    """The answer at `/` by which tools recognise Ollama."""
    return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})


async def embed(request: Request) -> Response:
    raise APIError("A gpt-oss model does not support embeddings.", code="unsupported")


async def change(request: Request) -> Response:
    raise APIError("This server only has the models that it was started with.", code="unsupported")


class OllamaModelList:
    def __init__(self, service: Service) -> None:
        self.service = service

    async def version(self, request: Request) -> Response:
        return json_response(Version(VERSION))

    async def tags(self, request: Request) -> Response:
        """Each name of each model, in Ollama's spelling."""
        names = {ollama_name(name): model for model in self.service.models for name in model.names}
        models = [OllamaModel(**_identity(name, model), modified_at=self._since) for name, model in names.items()]
        return json_response(OllamaModels(models))

    async def ps(self, request: Request) -> Response:
        """The models that take requests."""
        ready = [(model, model.engine.info) for model in self.service.models if model.state == "ready"]
        demand = self.service.demand
        ends = [None if demand is None else demand.expires_at(model) for model, _ in ready]
        loaded = zip(ready, ends, strict=True)
        return json_response(
            OllamaLoadedModels([_loaded(model, info, end) for (model, info), end in loaded if info is not None])
        )

    async def show(self, request: Request) -> Response:
        body = await decode(await self._body(request), OllamaModelRequest, request.scope)
        name, model = find(self.service, body.model or body.name)
        size, longest = _size(model), model.engine.info.max_model_len if model.engine.info else 0
        facts: dict[str, str | int] = {
            "general.architecture": "gptoss",
            "general.basename": name,
            "general.parameter_count": size.num_parameters,
            "gptoss.context_length": longest,
        }
        info = OllamaModelInfo(
            modelfile=f"FROM {ollama_name(name)}\n",
            parameters="temperature 1",
            template=_TEMPLATE,
            details=_details(size),
            model_info=facts,
            capabilities=CAPABILITIES,
            modified_at=self._since,
        )
        return json_response(info)

    async def pull(self, request: Request) -> Response:
        """Succeeds for a served model, which needs no download. Any other is downloaded, where models are on demand.

        Raises APIError: 404 for one that cannot be had, 401 and 403 without the right `admin`.
        """
        body = await decode(await self._body(request), OllamaPullRequest, request.scope)
        wanted = body.model or body.name
        demand = self.service.demand
        if demand is None or not wanted or self.service.served.find(wanted) is not None:
            find(self.service, wanted)
            progress = _nothing_to_pull()
        else:
            self.service.keys.check_admin(request.scope)
            progress = demand.pull(wanted)
        if body.stream is not False:
            return StreamingResponse(_lines(progress), media_type=NDJSON)
        async for _ in progress:
            pass
        return json_response(OllamaStatus("success"))

    async def delete(self, request: Request) -> Response:
        """Removes a model of --models-dir with its files. Raises APIError."""
        demand = self.service.demand
        assert demand is not None
        body = await decode(await self._body(request), OllamaModelRequest, request.scope)
        _, model = find(self.service, body.model or body.name)
        await demand.delete(model)
        return Response()

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self.service.config.server.max_body_bytes)

    @property
    def _since(self) -> str:
        return timestamp(self.service.started)


def _size(model: ServedModel) -> ModelSize:
    """All fields are 0 until the engine has reported them."""
    return model.engine.info.size if model.engine.info else ModelSize()


def _details(size: ModelSize) -> OllamaDetails:
    billions = size.num_parameters / 1e9
    return OllamaDetails(f"{billions:.1f}B" if billions >= 1 else f"{billions * 1e3:.1f}M")


def _identity(name: str, model: ServedModel) -> dict[str, Any]:
    """Name, size and digest. The digest is a hash of the name: no weights are read for it."""
    size, digest = _size(model), hashlib.sha256(model.root.encode()).hexdigest()
    return {"name": name, "model": name, "size": size.checkpoint_bytes, "digest": digest, "details": _details(size)}


async def _nothing_to_pull() -> AsyncIterator[PullProgress]:
    for status in ("pulling manifest", "success"):
        yield PullProgress(status)


async def _lines(progress: AsyncIterator[PullProgress]) -> AsyncIterator[bytes]:
    """An error ends them: the stream has begun."""
    try:
        async for one in progress:
            if one.digest is None:
                yield line(OllamaStatus(one.status))
            else:
                yield line(OllamaStatus(one.status, digest=one.digest, total=one.total, completed=one.completed))
    except APIError as error:
        yield line(ErrorText(error.message))


def _loaded(model: ServedModel, info: EngineInfo, expires_at: float | None) -> OllamaLoadedModel:
    bytes_on_gpu = info.size.checkpoint_bytes if info.size.on_gpu else 0
    return OllamaLoadedModel(
        **_identity(ollama_name(model.names[0]), model),
        size_vram=bytes_on_gpu,
        expires_at=_NEVER if expires_at is None else timestamp(expires_at),
        context_length=info.max_model_len,
    )
