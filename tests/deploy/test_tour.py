"""The notebook: stored with the outputs of a whole run, and its cells work one after the other."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server import ServerProcess

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"


def code_cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_it_is_stored_as_it_ran() -> None:
    """Where this fails, `make notebook` runs it and stores the outputs."""
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    said = json.dumps(outputs)
    for part in ("27 + 58 = 85.", "get_weather", "Anna", "image/png", "ended with status 0"):
        assert part in said, part


@pytest.mark.slow
def test_its_cells_work(
    nano_server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OSCINE_URL", nano_server.url)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    for cell in code_cells():
        exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
    said = capsys.readouterr().out
    assert "answer:    27 + 58 = 85." in said
    assert "call:   get_weather" in said
    assert "{'name': 'Anna', 'age': 31}" in said
    assert "pareto.png" in said
    assert "42" in said.splitlines()[-1]
