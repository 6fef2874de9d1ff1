"""The recipes in Python of docs/clients.md, as they stand there, for the clients that the tests install."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
SAID = {
    "OpenAI Agents SDK": "17",
    "LangChain": "name='Anna' age=31",
    "Ollama": "27 + 58 = 85.",
}


@pytest.mark.parametrize("client", SAID)
def test_the_recipe_prints_what_the_document_says(base_url: str, client: str) -> None:
    text = DOCUMENT.partition(f"\n## {client}\n")[2].partition("\n## ")[0]
    recipe = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert recipe is not None
    code = recipe[1].replace("http://127.0.0.1:8000", base_url.removesuffix("/v1"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert SAID[client] in done.stdout
