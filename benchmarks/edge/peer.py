"""One system with one model, in a process of its own, that runs loads as it is told: a line of JSON each way.

    {"concurrency": 1, "isl": 512, "osl": 64}  ->  {"first_s": ..., "step_s": ...}
    {}                                         ->  {"resident": bytes, "peak": bytes}

Seconds until every sequence has its first token, and of the median step after that. Knows neither Oscine nor llama.cpp:
their processes share nothing else.
"""

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median


def serve(run: Callable[[int, int, int], list[float]]) -> None:
    """Answers until the other end closes.

    `run`: concurrency, prompt tokens, generated tokens -> times: of the start, and when all sequences had their first
    token, their second, and so on.
    """
    out = sys.stdout
    sys.stdout = sys.stderr  # nothing else may write there
    print(json.dumps({}), file=out, flush=True)  # ready
    for line in sys.stdin:
        load = json.loads(line)
        if load:
            start, *times = run(load["concurrency"], load["isl"], load["osl"])
            answer = {"first_s": times[0] - start, "step_s": median(b - a for a, b in pairwise(times))}
        else:
            answer = _memory()
        print(json.dumps(answer), file=out, flush=True)


def _memory() -> dict[str, int]:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found = {name: int(fields[key].split()[0]) * 1024 for name, key in (("resident", "VmRSS"), ("peak", "VmHWM"))}
    return found
