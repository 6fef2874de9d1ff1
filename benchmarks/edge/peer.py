"""One system with one model in its own process, which runs loads on request: one line of JSON each way.

    {"concurrency": 1, "isl": 512, "osl": 64}  ->  {"first_s": ..., "step_s": ...}
    {}                                         ->  {"resident": bytes, "peak": bytes}

`first_s`: seconds until every sequence has its first token. `step_s`: seconds of the median step after that. This
module imports neither Oscine nor llama.cpp, so both can use it.
"""

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median


def serve(run: Callable[[int, int, int], list[float]]) -> None:
    """Answers until the other end closes.

    `run`: concurrency, prompt tokens, generated tokens -> the time of the start, then the times when all sequences had
    their first token, their second token, and so on.
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
