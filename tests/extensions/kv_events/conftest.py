from tests.engine_process.conftest import folder

__all__ = ["folder"]
