"""A cluster of this machine from start to end, through the commands of a user: `make cluster-demo`.

    python -m benchmarks.cluster.demo [FILE]

Starts examples/cluster/demo.yaml with the command line. Asks a question and requires a function call through the OpenAI
client. Prints the status, takes the cluster down, and looks for leftovers. Exit status 1 if any of this fails. With
BENCHMARK_RAY in the environment, FILE has `ray: auto`, and the processes of that Ray stay.
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

from benchmarks.cluster.cluster import OTHER_RAY

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
_RAY = ("--ray", "auto") if OTHER_RAY in os.environ else ()
_REPORT_S = 1.5  # replicas report every second
CITY, TOLD = "Paris", {"temperature": 21, "condition": "sunny"}


def main() -> int:
    file = sys.argv[1] if len(sys.argv) > 1 else str(FILE)
    started_s = time.monotonic()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="oscine-demo-") as state:
        os.environ["XDG_STATE_HOME"] = state  # keeps this cluster apart from others on this machine
        url = _oscine("up", file).split()[-1]  # leaves nothing behind if it fails
        note = Path(state, "oscine", "cluster.json")
        ray = json.loads(note.read_text()) if note.exists() else None
        started: dict[psutil.Process, str] = {}
        if ray is not None:
            owner = psutil.Process(ray["pid"])
            started = {process: process.name() for process in (owner, *owner.children(recursive=True))}
        try:
            wrong += _ask(openai.OpenAI(base_url=f"{url}/v1", api_key="none"))
            time.sleep(_REPORT_S)
            if not _WITH_PREFILL.search(_oscine("status")):
                wrong.append("no request was placed with a prefill replica")
        finally:
            _oscine("down")
    wrong += [f"left running: {process.pid} {name}" for process, name in started.items() if _runs(process)]
    if ray is not None and Path(ray["folder"]).exists():
        wrong.append(f"left behind: {ray['folder']}")
    for what in wrong:
        print(f"WRONG: {what}")
    print(f"{time.monotonic() - started_s:.0f} s; {'it failed' if wrong else 'all is right, and nothing is left'}")
    return 1 if wrong else 0


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _oscine(*arguments: str) -> str:
    """Runs a command; its output is also printed."""
    arguments += _RAY if arguments[0] != "up" else ()  # the file says it
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


def _ask(client: openai.OpenAI) -> list[str]:
    """The errors in the answers. Answers are greedy, so they are always the same."""
    (model,) = (model.id for model in client.models.list())
    wrong: list[str] = []

    def chat(messages: list[Any], **more: Any) -> Any:
        return client.chat.completions.create(model=model, messages=messages, temperature=0, **more).choices[0].message

    text = chat([{"role": "user", "content": QUESTION}]).content or ""
    print(f"> {QUESTION}\n{text}", flush=True)
    if ANSWER not in text:
        wrong.append(f"{ANSWER} is not in the answer")
    messages: list[Any] = [{"role": "user", "content": f"What is the weather in {CITY}?"}]
    print(f"> {messages[0]['content']}", flush=True)
    first = chat(messages, tools=[WEATHER])
    calls = [call for call in first.tool_calls or [] if call.type == "function"]
    if len(calls) != 1:
        return [*wrong, f"one call was expected, not {first}"]
    function = calls[0].function
    print(f"{function.name}({function.arguments}) = {json.dumps(TOLD)}", flush=True)
    if function.name != "get_weather" or json.loads(function.arguments) != {"city": CITY}:
        wrong.append(f"get_weather was to be called with {CITY}")
    told = {"role": "tool", "tool_call_id": calls[0].id, "content": json.dumps(TOLD)}
    last = chat([*messages, first, told], tools=[WEATHER]).content or ""
    print(last, flush=True)
    if str(TOLD["temperature"]) not in last:
        wrong.append(f"{TOLD['temperature']} is not in the answer")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
