"""The Vercel AI SDK over both APIs: `make clients`, which installs it with npm into runs/vercel."""

import json
import subprocess
from pathlib import Path

import pytest

INSTALLED = Path(__file__).parents[2] / "runs" / "vercel"


@pytest.mark.node
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_answers_streams_tools_and_reasoning(base_url: str, api: str) -> None:
    asked = subprocess.run(
        ["node", "ask.mjs", base_url, api], cwd=INSTALLED, capture_output=True, text=True, timeout=240, check=False
    )
    assert asked.returncode == 0, asked.stderr
    seen = json.loads(asked.stdout)
    assert "5" in seen["text"]
    assert "2 + 3" in seen["reasoning"]
    assert seen["streamed"] == {"text": seen["text"], "reasoning": seen["reasoning"]}
    assert seen["tokens"] > 0
    assert "17" in seen["called"]
    assert seen["stepped"] == seen["called"]
    assert seen["cities"] == ["Lisbon", "Lisbon"]
