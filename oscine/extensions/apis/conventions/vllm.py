"""vLLM's endpoints about a server: /load, /server_info, /tokenizer_info."""

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import oscine
from oscine.api.http.body import json_response
from oscine.api.serving.served_model import ServedModel
from oscine.api.serving.service import Service
from oscine.extensions.apis.conventions.schemas import ServerInfo, ServerLoad, TokenizerInfo
from oscine.settings.config import EngineOptions
from oscine.settings.option import Option, Options, options_of
from oscine.system.model_files import read_file

_TEMPLATE = "chat_template.jinja"


class Vllm:
    def __init__(self, service: Service) -> None:
        self.service = service

    async def load(self, request: Request) -> Response:
        return json_response(ServerLoad(self.service.served.running))

    async def server_info(self, request: Request) -> Response:
        """The options of each engine by their names, with the limits that a GPU's memory has set; the built-in tools.

        Those of the server may have secrets.
        """
        models = {model.names[0]: _options(model.options) | _limits(model) for model in self.service.models}
        return json_response(ServerInfo(oscine.__version__, models, self.service.tools.on_offer))

    async def tokenizer_info(self, request: Request) -> Response:
        _, model = self.service.find(request.query_params.get("model"))
        async with self.service.using(model):
            ready = model.ready()
        tokenizer = ready.tokenizer
        eos, pad, bos = "<|return|>", "<|endoftext|>", "<|startoftext|>"
        return json_response(
            TokenizerInfo(
                tokenizer_class="PreTrainedTokenizerFast",
                bos_token=bos,
                eos_token=eos,
                pad_token=pad,
                vocab_size=tokenizer.vocab_size,
                model_max_length=ready.info.max_model_len,
                chat_template=_template(tokenizer.path.parent),
            )
        )


def _options(engine: EngineOptions) -> dict[str, Any]:
    sections: tuple[Options, ...] = (engine.model, engine.cache, engine.scheduler, engine)
    values = {option.name: _value(section, option) for section in sections for option in options_of(type(section))}
    return {name: value for name, value in values.items() if not dataclasses.is_dataclass(value)}


def _value(section: Options, option: Option) -> Any:
    """As the option's name has it: a flag may switch its field off."""
    given = getattr(section, option.field)
    return not given if option.default is True else given


def _limits(model: ServedModel) -> dict[str, int]:
    """Those that no option has set, once the engine has told them."""
    info, by_memory = model.engine.info, model.options.scheduler.by_memory
    if info is None:
        return {}
    chosen = {name: getattr(info, name) for name in by_memory}
    return {name.replace("_", "-"): value for name, value in chosen.items() if value}


def _template(folder: Path) -> str | None:
    """None without a template that can be read."""
    with suppress(ValueError):
        return read_file(folder / _TEMPLATE).decode()
    return None
