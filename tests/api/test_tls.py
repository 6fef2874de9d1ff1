"""HTTPS: served with a certificate, refused in one line without a usable one. The certificate here lasts a century."""

import re
import socket
import ssl
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from oscine.api.http import tls_listener
from oscine.cli.error import CommandError
from oscine.cli.local_server import local_server
from oscine.settings.config import Config, EngineOptions, ModelOptions, ServerOptions

CERTIFICATE, KEY = (str(Path(__file__).parent / "tls" / name) for name in ("certificate.pem", "key.pem"))


def server(folder: Path, certificate: str, key: str | None, **options: Any) -> AbstractContextManager[str]:
    engine = EngineOptions(model=ModelOptions(model=str(folder)), executor="fake")
    tls = ServerOptions(port=0, drain_s=0.0, ssl_certfile=certificate, ssl_keyfile=key, **options)
    return local_server(Config(engine, tls))


def test_https(model_folder: Path) -> None:
    trust = ssl.create_default_context(cafile=CERTIFICATE)
    with server(model_folder, CERTIFICATE, KEY) as url, httpx.Client(verify=trust) as http:
        assert url.startswith("https://")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http) as client:
            *_, last = client.completions.create(
                model=model_folder.name, prompt="a", max_tokens=3, stream=True, stream_options={"include_usage": True}
            )
            assert last.usage is not None
            assert last.usage.completion_tokens == 3
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url.replace('https', 'http')}/health")


def test_connections_that_never_shake_hands_count(model_folder: Path) -> None:
    trust = ssl.create_default_context(cafile=CERTIFICATE)
    with server(model_folder, CERTIFICATE, KEY, max_connections=10) as url, ExitStack() as held:
        address = httpx.URL(url).host, httpx.URL(url).port or 0
        silent = [held.enter_context(socket.create_connection(address)) for _ in range(100)]
        for connection in silent[:50]:
            connection.send(b"\x16\x03\x01")  # the beginning of a handshake
        with httpx.Client(verify=trust) as http:
            for _ in range(3):
                assert http.get(f"{url}/v1/health/live").status_code == 200
            metrics = http.get(f"{url}/metrics").text
        (open_ones,) = re.findall(r"^oscine:http_connections (\S+)$", metrics, re.MULTILINE)
        assert float(open_ones) <= 10
        for connection in silent[:80]:
            connection.settimeout(30)
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b"", "displaced"


def test_a_handshake_has_a_deadline(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_listener, "HEAD_S", 0.1)
    with server(model_folder, CERTIFICATE, KEY) as url, ExitStack() as held:
        address = httpx.URL(url).host, httpx.URL(url).port or 0
        assert held.enter_context(socket.create_connection(address, timeout=30)).recv(1) == b""


@pytest.mark.parametrize(("certificate", "key"), [("/no/such.pem", KEY), (CERTIFICATE, None), (KEY, CERTIFICATE)])
def test_files_that_cannot_be_used(model_folder: Path, certificate: str, key: str | None) -> None:
    with pytest.raises(CommandError) as caught, server(model_folder, certificate, key):
        pass
    assert str(caught.value).startswith(f"--ssl-certfile {certificate}")
    assert ("--ssl-keyfile" in str(caught.value)) == (key is not None)
    assert "\n" not in str(caught.value)


def test_a_key_without_a_certificate_is_refused() -> None:
    with pytest.raises(ValueError, match="--ssl-keyfile must be given with --ssl-certfile"):
        ServerOptions(ssl_keyfile=KEY)
