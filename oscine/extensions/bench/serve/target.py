"""The server under test: its address, its models, its energy counter."""

import http.client
import json
import re
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

_ENERGY = ("oscine_energy_joules_total", "oscine:energy_joules_total")
_PATIENCE_S = 10.0


class TargetError(Exception):
    """The server cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    host: str
    port: int
    prefix: str  # of every path
    is_tls: bool
    api_key: str | None

    @classmethod
    def parse(cls, url: str, api_key: str | None) -> "Target":
        """The URL may lack http:// and end in /v1. Raises ValueError."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{url} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url} is not the URL of a server")
        is_tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), prefix, is_tls, api_key)

    @property
    def url(self) -> str:
        return f"http{'s' if self.is_tls else ''}://{self._authority}{self.prefix}"

    @property
    def _authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def request(self, path: str, body: bytes) -> bytes:
        """A whole POST request, as it is sent."""
        lines = [
            f"POST {self.prefix}{path} HTTP/1.1",
            f"Host: {self._authority}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in self._key_header.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body

    @property
    def _key_header(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.is_tls else None

    def find_model(self, name: str | None) -> str:
        """Checks that the server answers, takes the key and has the model. Without a name: its first model."""
        status, body = self._get("/v1/models")
        if status in (401, 403):
            raise TargetError(f"{self.url} refuses the API key ({status}); give it with --api-key or OPENAI_API_KEY")
        try:
            if status != 200:
                raise ValueError(body[:200].decode(errors="replace"))
            known = [str(model["id"]) for model in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            if name:
                return name  # the server lists no models, so the name cannot be checked
            raise TargetError(
                f"{self.url} answered {status} to /v1/models: {error}; name a model with --model"
            ) from None
        if not known or (name and name not in known):
            raise TargetError(f"{self.url} has no model {name or ''}; it has {', '.join(known) or 'none'}")
        return name or known[0]

    def energy_j(self) -> float | None:
        """Joules used so far; None if the server does not say."""
        try:
            status, body = self._get("/metrics")
        except TargetError:
            return None
        return sum_of(body.decode(errors="replace"), _ENERGY) if status == 200 else None

    def _get(self, path: str) -> tuple[int, bytes]:
        try:
            connection = self._connection()
            try:
                connection.request("GET", self.prefix + path, headers=self._key_header)
                response = connection.getresponse()
                return response.status, response.read()
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            raise TargetError(f"no answer from {self.url}: {error or type(error).__name__}") from None

    def _connection(self) -> http.client.HTTPConnection:
        if (context := self.tls()) is not None:
            return http.client.HTTPSConnection(self.host, self.port, timeout=_PATIENCE_S, context=context)
        return http.client.HTTPConnection(self.host, self.port, timeout=_PATIENCE_S)


def sum_of(metrics: str, names: tuple[str, ...]) -> float | None:
    """The sum over all samples of the Prometheus metrics with these names; None if there is none."""
    sample = re.compile(rf"^(?:{'|'.join(names)})(?:{{.*}})?\s+(\S+)", re.MULTILINE)
    values = [float(value) for value in sample.findall(metrics)]
    return sum(values) if values else None
