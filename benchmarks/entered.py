"""Which files of Oscine one streamed chat request enters, and how many functions and lines they have.

    python -m benchmarks.entered            one line per process and room
    python -m benchmarks.entered --files    the files too

A real server answers with the embedded model on a CPU. The request has a function to call and a JSON schema for its
answer. It is the second of its kind, so that its grammar is known. Each process counts the functions that are called
between the moment before the request is sent and the moment after its last event has arrived, but for those that it
also calls while nobody asks.
"""

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

from benchmarks.serving.server import Server

ROOT = Path(__file__).parents[1]
# Python imports a module of this name when it starts. Every process of the server has it.
COUNTER = """
import json, os, pathlib, sys, threading, time

ROOT, FLAG = os.environ["ENTERED_ROOT"], pathlib.Path(os.environ["ENTERED_FOLDER"], "on")
seen, recording = set(), False


def profile(frame, event, _):
    if recording and event == "call" and frame.f_code.co_filename.startswith(ROOT):
        seen.add((frame.f_code.co_filename, frame.f_code.co_qualname))


def watch():
    global recording
    while True:
        was, recording = recording, FLAG.exists()
        if was and not recording:
            out = FLAG.with_name(f"{os.getpid()}.json")
            if out.exists():
                before = {tuple(call) for call in json.loads(out.read_text())}
                seen.difference_update(before)
            out.with_suffix(".part").write_text(json.dumps(sorted(seen)))
            out.with_suffix(".part").rename(out)
            seen.clear()
        time.sleep(0.02)


threading.Thread(target=watch, daemon=True).start()
threading.setprofile(profile)
sys.setprofile(profile)
"""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
REQUEST = {
    "model": "oscine-nano",
    "messages": [{"role": "user", "content": "Which city is the capital of France?"}],
    "tools": [
        {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}}
    ],
    "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
    "stream": True,
    "max_tokens": 200,
}
IDLE_S = 5.0  # in which each process does what it always does
QUIET_S = 0.5  # so that each process has seen the flag


def ask(url: str) -> None:
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=REQUEST, timeout=60) as response:
        response.raise_for_status()
        for _ in response.iter_lines():
            pass


def entered() -> dict[int, set[tuple[str, str]]]:
    """By process: files below oscine/, and the names of their functions."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.joinpath("sitecustomize.py").write_text(COUNTER)
        path = os.pathsep.join([name, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"PYTHONPATH": path, "ENTERED_FOLDER": name, "ENTERED_ROOT": f"{ROOT / 'oscine'}{os.sep}"}
        with Server("oscine-nano", "--device", "cpu", environment=environment) as server:
            ask(server.url)
            time.sleep(QUIET_S)
            for does in (lambda: time.sleep(IDLE_S), lambda: ask(server.url)):
                folder.joinpath("on").touch()
                time.sleep(QUIET_S)
                does()
                folder.joinpath("on").unlink()
                time.sleep(QUIET_S)
            found = {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}
    prefix = len(str(ROOT / "oscine")) + 1
    return {pid: {(file[prefix:], function) for file, function in calls} for pid, calls in found.items() if calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="print the files")
    options = parser.parse_args()
    found = entered()
    for calls in found.values():
        files = {file for file, _ in calls}
        print(f"a process: {len(files)} files, {len(calls)} functions")
    files = {file for calls in found.values() for file, _ in calls}
    lines = sum((ROOT / "oscine" / file).read_text().count("\n") for file in files)
    rooms = Counter("/".join(file.split("/")[: 2 if file.startswith("extensions") else 1]) for file in files)
    print(f"all: {len(files)} files of {lines:,} lines ({', '.join(f'{room} {n}' for room, n in rooms.most_common())})")
    if options.files:
        print(*sorted(files), sep="\n")


if __name__ == "__main__":
    main()
