"""A cluster of this machine from its start to its end, as a person would use it: `make cluster-demo`.

    python -m benchmarks.cluster.demo [FILE]

Brings up examples/cluster/demo.yaml with the command line, asks it a question and lets it call a function through the
OpenAI client, prints its status, takes it down, and looks for what it left. Exit status 1 when anything of that fails.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import openai
import psutil

FILE = Path(__file__).parents[2] / "examples" / "cluster" / "demo.yaml"
QUESTION, ANSWER = "What is 27 + 58?", "85"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_WITH_PREFILL = re.compile(r"[1-9]\d* with a prefill replica")
_REPORT_S = 1.5  # replicas say every second how they are
CITY, TOLD = "Paris", {"temperature": 21, "condition": "sunny"}


def main() -> int:
    file = sys.argv[1] if len(sys.argv) > 1 else str(FILE)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="oscine-demo-") as state:
        os.environ["XDG_STATE_HOME"] = state  # another cluster of this machine is not this one
        try:
            url = _oscine("up", file).split()[-1]
            started = psutil.Process(_pid(state)).children(recursive=True)
            right = _ask(openai.OpenAI(base_url=f"{url}/v1", api_key="none"))
            time.sleep(_REPORT_S)
            status = _oscine("status")
        finally:
            _oscine("down")
        left = [process for process in started if process.is_running()]
    for process in left:
        print(f"left running: {process.pid} {' '.join(process.cmdline())}")
    print(f"{time.monotonic() - started_s:.0f} s")
    return 0 if right and not left and _WITH_PREFILL.search(status) else 1


def _oscine(*arguments: str) -> str:
    """What the command prints is shown, too."""
    print(f"$ oscine cluster {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "oscine", "cluster", *arguments]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise SystemExit(f"`oscine cluster {arguments[0]}` failed")
    return "".join(lines)


def _pid(state: str) -> int:
    return int(json.loads(Path(state, "oscine", "cluster.json").read_text())["pid"])


def _ask(client: openai.OpenAI) -> bool:
    (model,) = (model.id for model in client.models.list())
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": QUESTION}])
    text = answer.choices[0].message.content or ""
    print(f"> {QUESTION}\n{text}", flush=True)
    messages: list[Any] = [{"role": "user", "content": f"What is the weather in {CITY}?"}]
    first = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER])
    print(f"> {messages[0]['content']}", flush=True)
    calls = first.choices[0].message.tool_calls or []
    if len(calls) != 1 or calls[0].type != "function":
        print(f"no call: {first.choices[0].message}")
        return False
    function = calls[0].function
    print(f"{function.name}({function.arguments}) = {json.dumps(TOLD)}", flush=True)
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": calls[0].id, "content": json.dumps(TOLD)}]
    last = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER]).choices[0].message.content
    print(last, flush=True)
    called = function.name == "get_weather" and json.loads(function.arguments) == {"city": CITY}
    return ANSWER in text and called and str(TOLD["temperature"]) in (last or "")


if __name__ == "__main__":
    sys.exit(main())
