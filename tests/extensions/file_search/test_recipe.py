"""The recipe of docs/file-search.md, as it is written there."""

import re

import pytest

from tests.documents.site import DOCS
from tests.server import ServerProcess


def test_the_recipe_runs(fake_server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "file-search.md").read_text(), re.DOTALL)
    local = 'OpenAI(base_url="http://localhost:8000/v1"'
    assert local in code
    variables: dict[str, object] = {}
    exec(code.replace(local, f'OpenAI(base_url="{fake_server.url}/v1"'), variables)
    variables["client"].close()  # type: ignore[attr-defined]
    assert re.match(r"[01]\.\d\d handbook\.md: # Refunds\n", capsys.readouterr().out)
