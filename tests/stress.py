"""`make stress`: repeats the tests that once failed on a busy machine, beside two busy loops. Not part of CI."""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

FILES = (
    "tests/extensions/apis/test_batches.py",
    "tests/extensions/apis/test_conventions.py",
    "tests/api/test_lifecycle.py",
    "tests/extensions/apis/test_response_storage_fails.py",
    "tests/api/test_wire.py",
    "tests/cli/test_interrupts.py",
    "tests/extensions/formats/test_models.py",
    "tests/extensions/cluster/test_router_address.py",
    "tests/extensions/cluster/test_router_client.py",
    "tests/extensions/cluster/test_traces.py",
    "tests/extensions/offload/test_engine.py",
    "tests/extensions/parallel/test_peers.py",
    "tests/extensions/parallel/test_watch.py",
    "tests/executor/test_grammar_judges.py",
    "tests/extensions/parallel/test_liveness.py",
    "tests/extensions/tools/test_mcp.py",
)
PYTEST = ("-m", "pytest", "-p", "xdist", "-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin", "-n", "4")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # as in `make test`
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with this process in any case


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def passes() -> bool:
    """Runs one round. Prints its output if it fails."""
    command = [sys.executable, *PYTEST, *FILES]
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        print(done.stdout)
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="number of rounds (default: %(default)s)")
    rounds = parser.parse_args().rounds
    with busy_loops(2):
        for number in range(rounds):
            if not passes():
                sys.exit(f"round {number + 1} failed; {number} of {rounds} rounds passed before it")
            print(f"{number + 1} of {rounds} rounds passed", flush=True)


if __name__ == "__main__":
    main()
