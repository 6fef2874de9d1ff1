"""The application over a scripted engine, in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from oscine.chat.tokenizer import Tokenizer
from tests.api.scripted_server import ScriptedServer


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer(model_folder)


@pytest.fixture
def scripted(model_folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(model_folder) as server:
        yield server
