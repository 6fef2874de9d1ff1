"""The APIs of a server beside OpenAI's chat completions, and the service with all of them.

Packages outside add APIs by entry points of the group `oscine.apis`: subclasses of oscine.api.interface.Api.
"""

import logging
from importlib.metadata import entry_points

from oscine.api.interface import Api
from oscine.api.serving.service import Service
from oscine.settings.config import Config
from oscine.system.extensions import is_there, load

logger = logging.getLogger(__name__)

GROUP = "oscine.apis"
# name -> class. In the order of their paths: the first path that matches serves.
APIS = {
    "responses": "oscine.extensions.apis.responses.api:ResponsesApi",
    "anthropic": "oscine.extensions.apis.anthropic.api:AnthropicApi",
    "batches": "oscine.extensions.apis.batches.api:BatchesApi",
    "ollama": "oscine.extensions.apis.ollama.api:OllamaApi",
    "conventions": "oscine.extensions.apis.conventions.api:ConventionsApi",
}


def make_service(config: Config) -> Service:
    """With all APIs that are installed. Raises ValueError, in one line, for an option that cannot be used."""
    service = Service(config)
    for name, place in APIS.items():
        if is_there(place):
            service.apis[name] = load(place)(service)
    for entry in entry_points(group=GROUP):
        try:
            kind = entry.load()
            if not issubclass(kind, Api) or entry.name in APIS:
                raise TypeError("it is no Api with a name of its own")
            service.apis[entry.name] = kind(service)
        except Exception as error:  # whatever another package does
            logger.warning("the API %s of %s cannot be used: %s", entry.name, entry.value, error)
    return service
