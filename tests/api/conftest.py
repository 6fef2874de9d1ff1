"""Servers and clients for the API's tests: a scripted one in this process, and real ones in processes of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from oscine.chat.tokenizer import Tokenizer
from tests.api.scripted_server import ScriptedServer
from tests.fake_model import write_fake_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("fake-model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer(model_folder)


@pytest.fixture
def scripted(model_folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(model_folder) as server:
        yield server
