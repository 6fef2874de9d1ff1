"""The application over a scripted engine, in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from oscine.api.http import uvicorn_protocol
from oscine.chat.tokenizer import Tokenizer
from tests.api.scripted_server import ScriptedServer
from tests.api.wire_server import LONG_S


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer(model_folder)


@pytest.fixture
def scripted(model_folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(model_folder) as server:
        yield server


@pytest.fixture
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is ended because the machine is slow."""
    for name in ("HEAD_S", "LINGER_S", "STALLED_S"):
        monkeypatch.setattr(uvicorn_protocol, name, LONG_S)
