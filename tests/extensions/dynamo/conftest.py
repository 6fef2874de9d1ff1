"""For the environment of `make dynamo-test`. In other environments no test of this folder is collected."""

import importlib.util
from pathlib import Path

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("dynamo") else ["test_*.py"]


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for TIKTOKEN_ENCODINGS_BASE."""
    from tests.extensions.dynamo.fleet import write_vocabulary

    folder = tmp_path_factory.mktemp("vocabulary")
    write_vocabulary(folder)
    return folder
