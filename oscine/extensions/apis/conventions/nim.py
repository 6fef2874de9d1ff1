"""NIM's endpoints about the deployment: /v1/metadata, /v1/version, /v1/license, /v1/manifest."""

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

import yaml
from starlette.requests import Request
from starlette.responses import Response

import oscine
from oscine.api.http.body import json_response
from oscine.api.serving.service import Service
from oscine.extensions.apis.conventions.profiles import PROFILES, profile_of
from oscine.extensions.apis.conventions.schemas import NimLicense, NimManifest, NimMetadata, NimModel, NimVersion

_API = "1.0.0"  # of these endpoints
_LICENSE = "LICENSE"


class Nim:
    def __init__(self, service: Service) -> None:
        self.service = service

    async def version(self, request: Request) -> Response:
        return json_response(NimVersion(oscine.__version__, _API))

    async def license(self, request: Request) -> Response:
        return json_response(_license())

    async def metadata(self, request: Request) -> Response:
        profile = profile_of(self.service.config)
        models = [NimModel(model.root, model.names[0]) for model in self.service.models]
        answer = NimMetadata(
            version=oscine.__version__,
            assetInfo=[],
            licenseInfo=_license(),
            modelInfo=models,
            repository_override="",
            selectedModelProfileId=profile.id if profile else "",
        )
        return json_response(answer)

    async def manifest(self, request: Request) -> Response:
        """All profiles, as YAML."""
        profiles = {profile.id: {"name": profile.name, "tags": profile.tags} for profile in PROFILES}
        text = yaml.safe_dump({"schema_version": "1.0", "profiles": profiles}, sort_keys=False)
        return json_response(NimManifest(text, ""))


@cache
def _license() -> NimLicense:
    text = _text()
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    url = "https://www.apache.org/licenses/LICENSE-2.0"
    return NimLicense("Apache License 2.0", _LICENSE, sha, len(text), url, "file", text)


def _text() -> str:
    """From the installed package, or from the checkout."""
    for path in metadata.files("oscine") or ():
        if path.name == _LICENSE and path.locate().exists():  # type: ignore[attr-defined]
            return path.read_text()
    return (Path(oscine.__file__).parents[1] / _LICENSE).read_text()
