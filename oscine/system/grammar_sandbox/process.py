"""A process that tries grammars: `python -P -m oscine.system.grammar_sandbox.process`.

It prints one line when it is ready. Then it reads one JSON list of checks per line, and prints their first problem or
null. It ends when its standard input ends, even in the middle of a check.
"""

import json
import os
import queue
import resource
import sys
import threading

from oscine.system.grammar_sandbox.check import GrammarCheck, first_problem

_MEMORY_BYTES = 2 << 30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    import llguidance  # noqa: F401  # the import takes a while, and the first grammar will come soon

    print("ready", flush=True)
    while True:
        problem = first_problem([GrammarCheck(*check) for check in json.loads(lines.get())])
        print(json.dumps(problem), flush=True)


def _read(lines: "queue.SimpleQueue[bytes]") -> None:
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
