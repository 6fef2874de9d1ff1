"""The checkpoint of the tests of engine processes."""

from tests.engine_process.conftest import folder

__all__ = ["folder"]
