"""vLLM's endpoints that load and unload LoRA adapters of a server that runs. Both need the right `admin`."""

import os
from typing import Annotated

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from oscine.api.common.errors import APIError, Error, invalid, not_found, unavailable
from oscine.api.http.body import read_body
from oscine.api.interface import Api
from oscine.api.openapi import POST, Operation
from oscine.api.serving.parameters import ShortText, about
from oscine.api.serving.schemas import decode
from oscine.api.serving.served_model import ServedModel
from oscine.engine.wire.stream import EngineDied
from oscine.settings.adapters import named_adapter

_EXAMPLE = {"lora_name": "sql", "lora_path": "/adapters/sql"}


class LoadRequest(Struct):
    lora_name: Annotated[ShortText, about("Name by which requests call the adapter as their `model`.")]
    lora_path: Annotated[ShortText, about("Folder on the server with `adapter_config.json`, as PEFT writes it.")]
    load_inplace: Annotated[bool | None, about("Replaces an adapter of this name; its requests go on.")] = None
    base_model_name: Annotated[ShortText | None, about("Its base model, where the server has several.")] = None


class UnloadRequest(Struct):
    lora_name: Annotated[ShortText, about("Name of the adapter. Requests that use it go on.")]
    lora_int_id: Annotated[int | None, about("Has no effect.")] = None


class AdaptersApi(Api):
    @property
    def operations(self) -> list[Operation]:
        errors = {"403": Error}
        return [
            POST(
                "/v1/load_lora_adapter",
                self.load,
                "Load a LoRA adapter",
                body=LoadRequest,
                answer="text/plain",
                admin=True,
                other=errors,
                example=_EXAMPLE,
            ),
            POST(
                "/v1/unload_lora_adapter",
                self.unload,
                "Unload a LoRA adapter",
                body=UnloadRequest,
                answer="text/plain",
                admin=True,
                other=errors,
                example={"lora_name": "sql"},
            ),
        ]

    async def load(self, request: Request) -> Response:
        received = await read_body(request, self.service.config.server.max_body_bytes)
        body = await decode(received, LoadRequest, request.scope)
        _, model = self.service.find(body.base_model_name)
        model.ready()
        if not model.options.adapters.enable_lora:
            raise APIError("This server takes no LoRA adapters: start it with --enable-lora.", code="lora_disabled")
        name = body.lora_name
        if named_adapter(f"{name}=x") is None or "=" in name:
            raise invalid("lora_name", "it must be up to 200 characters that can be printed, without '='")
        holder = self._holder(name)
        if holder is None and name in self.service.names:
            raise invalid("lora_name", f"{name!r} is a model of this server")
        if holder is not None and not body.load_inplace:
            raise invalid("lora_name", f"there is an adapter {name!r} already; `load_inplace` replaces it")
        try:
            if holder is None:
                await model.load_adapter(name, os.path.expanduser(body.lora_path))
            else:
                await holder.replace_adapter(name, os.path.expanduser(body.lora_path))
        except ValueError as error:
            raise invalid("lora_path", str(error)) from None
        except EngineDied as error:
            raise unavailable(f"The engine is not available: {error}.", code="engine_unavailable") from None
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        received = await read_body(request, self.service.config.server.max_body_bytes)
        body = await decode(received, UnloadRequest, request.scope)
        holder = self._holder(body.lora_name)
        if holder is None:
            message = f"There is no LoRA adapter '{body.lora_name}'."
            raise not_found(message, "adapter_not_found", "lora_name")
        try:
            holder.unload_adapter(body.lora_name)
        except ValueError as error:
            raise invalid("lora_name", str(error)) from None
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _holder(self, name: str) -> ServedModel | None:
        return next((model for model in self.service.models if name in model.engine.adapters), None)
