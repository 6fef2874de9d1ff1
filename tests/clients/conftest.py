"""Unmodified clients against the embedded model: only the base URL is set."""

import pytest

from tests.server import ServerProcess


@pytest.fixture(scope="session")
def base_url(nano_server: ServerProcess) -> str:
    return f"{nano_server.url}/v1"
