"""Unmodified clients against the embedded model: they are told a base URL, and nothing else is done for them."""

import pytest

from tests.server import ServerProcess


@pytest.fixture(scope="session")
def base_url(nano_server: ServerProcess) -> str:
    return f"{nano_server.url}/v1"
