"""Models that take turns in memory: how long a switch takes, which requests fail, and what memory is lost.

    python -m benchmarks.serving.switching --minutes 8 --clients 4
    python -m benchmarks.serving.switching --minutes 4 --clients 1 -- --models one two --random-weights 20b \
        --enable-sleep-mode

What comes after `--` are options of `oscine serve`; without them, two copies of the embedded model take turns. Clients
ask models at random, with a `keep_alive` at random; a single client alternates. Its requests are for one token, so
their time is that of the switch, by the state in which the model was before. Exits with status 1 if a request failed.
"""

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from benchmarks.serving.server import Server
from oscine.checkpoint.hub import NANO_FOLDER

KEEP = (None, None, 0, -1, "1s")
_TIMEOUT_S = 900.0
_MIB = 1 << 20


@dataclass
class Outcome:
    """Of all requests; filled by several threads."""

    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # by the state before
    failures: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(map(len, self.seconds.values())) + len(self.failures)


class Client:
    def __init__(self, url: str, outcome: Outcome, seed: int, *, alternates: bool, tokens: int) -> None:
        """`alternates`: it is the only client, and times switches; else it asks models at random."""
        self._http = httpx.Client(base_url=url, timeout=_TIMEOUT_S)
        self._outcome, self._random, self._alternates, self._tokens = outcome, random.Random(seed), alternates, tokens
        self._count = 0
        self._states: dict[str, str] = {}

    def states(self) -> dict[str, str]:
        return {model["id"]: model["state"] for model in self._http.get("/v1/models").json()["data"]}

    def ask(self) -> None:
        """One request."""
        if self._alternates or not self._states:
            self._states = self.states()
        states, names = self._states, list(self._states)
        name = names[self._count % len(names)] if self._alternates else self._random.choice(names)
        keep = None if self._alternates else self._random.choice(KEEP)
        self._count += 1
        body = {
            "model": name,
            "messages": [{"role": "user", "content": f"Say {self._count}."}],
            "stream": False,
            "options": {"num_predict": self._tokens},
            **({} if keep is None else {"keep_alive": keep}),
        }
        began_s = time.monotonic()
        try:
            answer = self._http.post("/api/chat", json=body)
        except httpx.HTTPError as error:
            self._outcome.failures.append(f"{name}: {error!r}")
            return
        if answer.status_code == 200 and answer.json()["done"]:
            kind = states[name] if self._alternates else "any"
            self._outcome.seconds[kind].append(time.monotonic() - began_s)
        else:
            self._outcome.failures.append(f"{name}: {answer.status_code} {answer.text[:200]}")

    def close(self) -> None:
        self._http.close()


def run_clients(url: str, count: int, *, requests: int | None = None, seconds: float = 0.0) -> Outcome:
    """`requests` of each client, or as many as there is time for."""
    outcome, end_s = Outcome(), time.monotonic() + seconds

    def work(number: int) -> None:
        client = Client(url, outcome, number, alternates=count == 1, tokens=1 if count == 1 else 8)
        done = 0
        while done < requests if requests is not None else time.monotonic() < end_s:
            client.ask()
            done += 1
        client.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def put_to_sleep(url: str) -> None:
    """All models leave the memory of the device."""
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as http:
        for model in http.get("/v1/models").json()["data"]:
            http.post("/sleep", params={"model": model["id"]}).raise_for_status()


def memory(pid: int) -> dict[str, float]:
    """MiB that the server's processes have for themselves, and that are in use on the first GPU."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    host = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            host += process.memory_full_info().uss
    found = {"host": host / _MIB}
    if (tool := shutil.which("nvidia-smi")) is not None:
        query = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        found["GPU"] = float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])
    return found


def measure(server: Server, minutes: float, clients: int) -> Outcome:
    num_models = len(httpx.get(f"{server.url}/v1/models").json()["data"])
    warm = run_clients(server.url, 1, requests=2 * num_models)
    put_to_sleep(server.url)
    before = memory(server.pid)
    outcome = run_clients(server.url, clients, seconds=60 * minutes)
    put_to_sleep(server.url)
    after = memory(server.pid)
    outcome.failures += warm.failures
    for state, seconds in warm.seconds.items():
        print(f"at first, {state}: {', '.join(f'{one:.2f}' for one in seconds)} s")
    for state, seconds in outcome.seconds.items():
        median, most = statistics.median(seconds), max(seconds)
        print(f"{state}: {len(seconds)} requests, median {median:.3f} s, longest {most:.3f} s")
    for place, size in after.items():
        print(f"{place}: {before[place]:.0f} MiB before, {size:.0f} MiB after, {size - before[place]:+.0f} MiB")
    print(f"{len(outcome.failures)} of {outcome.count} requests failed")
    for failure in outcome.failures[:10]:
        print(f"  {failure}")
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("options", nargs="*", help="of oscine serve")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = args.options
        if not options:
            for name in ("one", "two"):
                shutil.copytree(NANO_FOLDER, Path(folder) / name)
            options = ["--models-dir", folder, "--max-loaded-models", "1", "--enable-sleep-mode"]
        with Server(*options, "--log-level", "warning") as server:
            outcome = measure(server, args.minutes, args.clients)
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
