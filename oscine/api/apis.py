"""The APIs of a server beside OpenAI's chat completions, and the service with all of them.

Packages outside add APIs by entry points of the group `oscine.apis`: subclasses of oscine.api.interface.Api.
"""

import logging
from importlib.metadata import EntryPoint

from oscine.api.interface import Api
from oscine.api.serving.service import Service
from oscine.settings.config import OPTIONS as OPTIONS_BY_NAME
from oscine.settings.config import Config
from oscine.settings.option import OptionError
from oscine.system.extensions import added, is_there, lacking, load

logger = logging.getLogger(__name__)

GROUP = "oscine.apis"
# name -> class. In the order of their paths: the first path that matches serves.
APIS = {
    "responses": "oscine.extensions.apis.responses.api:ResponsesApi",
    "websocket": "oscine.extensions.apis.websocket.api:WebSocketApi",
    "conversations": "oscine.extensions.apis.conversations.api:ConversationsApi",
    "anthropic": "oscine.extensions.apis.anthropic.api:AnthropicApi",
    "file_search": "oscine.extensions.file_search.api:FileSearchApi",
    "batches": "oscine.extensions.apis.batches.api:BatchesApi",
    "ollama": "oscine.extensions.apis.ollama.api:OllamaApi",
    "conventions": "oscine.extensions.apis.conventions.api:ConventionsApi",
    "models": "oscine.extensions.models.api:ModelsApi",
}
NEEDS = {  # without these an API is absent too
    "anthropic": ("responses",),
    "batches": ("responses",),
    "conversations": ("responses",),
    "conventions": ("responses",),
    "file_search": ("batches", "responses"),
    "websocket": ("responses",),
}
OPTIONS = {  # of one API alone
    "responses-db": "responses",
    "files-dir": "batches",
    "embeddings-url": "file_search",
    "models": "models",
    "models-dir": "models",
}


def installed() -> list[str]:
    """Names of the APIs of the table that are there."""
    found = [name for name, place in APIS.items() if is_there(place)]
    return [name for name in found if {*NEEDS.get(name, ())} <= {*found}]


def check_options(config: Config) -> None:
    """Raises OptionError for an option, as the user gave it, whose API is missing."""
    given = {**vars(config.server), **vars(config.tools.file_search), **vars(config.models)}
    for option, name in OPTIONS.items():
        if given[OPTIONS_BY_NAME[option].field] not in (None, ()) and name not in installed():
            raise OptionError(option, lacking(APIS[name]))


def make_service(config: Config) -> Service:
    """With all APIs that are installed. Raises ValueError, in one line, for an option that cannot be used."""
    service = Service(config)
    for name in installed():
        service.apis[name] = load(APIS[name])(service)

    def made(entry: EntryPoint) -> tuple[str, Api]:
        kind = entry.load()
        if not issubclass(kind, Api) or entry.name in APIS:
            raise TypeError("it is no Api with a name of its own")
        return entry.name, kind(service)

    service.apis.update(added(GROUP, "the API", logger.warning, made))
    return service
