"""Oscine beside llama.cpp on this CPU, on the same GGUF files: `make bench-edge`, docs/measuring.md.

Both run in turns, each in a process of its own, with the same number of threads. The best of several rounds counts.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.edge import files
from oscine.extensions.bench.machine import describe

RESULTS = Path("benchmarks/results/edge.jsonl")
HERE = Path(__file__).parent
SYSTEMS = ("oscine", "llama_cpp")
LAYERS = 24  # of 20b
_CONTEXT = 8192  # most tokens of a sequence
_FEW = 8  # models of up to this number of layers stay in memory while the other system runs

Answer = Mapping[str, float]
Best = dict[str, dict[str, float]]  # line -> system -> value


class Load(NamedTuple):
    concurrency: int
    isl: int
    osl: int


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    load: Load
    unit: str
    value: Callable[[Answer, Load], float]
    more_is_better: bool = True


def _decode(answer: Answer, load: Load) -> float:
    return load.concurrency / answer["step_s"]


def _prompt(answer: Answer, load: Load) -> float:
    return load.concurrency * load.isl / answer["first_s"]


def _step_ms(answer: Answer, load: Load) -> float:
    return 1e3 * answer["step_s"]


def _gigabytes(answer: Answer, load: Load) -> float:
    return answer["resident"] / 1e9


MEMORY = "resident memory, 8k of context"
BIG = (
    Line("decode, one stream, 512 of context", Load(1, 512, 33), "tok/s", _decode),
    Line("prompt of 512", Load(1, 512, 2), "tok/s", _prompt),
    Line("decode, 8 streams", Load(8, 64, 33), "tok/s", _decode),
    Line(MEMORY, Load(1, 512, 2), "GB", _gigabytes, more_is_better=False),
)
SMALL = (
    Line("decode, one stream, 64 of context", Load(1, 64, 129), "tok/s", _decode),
    Line("step of 64 sequences", Load(64, 16, 33), "ms", _step_ms, more_is_better=False),
)


class System:
    """The process of Oscine or of llama.cpp; see peer.py."""

    def __init__(self, command: list[str], threads: int, cache: Path) -> None:
        """`cache`: of weights that Oscine packs."""
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "XDG_CACHE_HOME": str(cache.resolve())}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def ask(self, what: Mapping[str, Any]) -> Answer:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._read()

    def measure(self, line: Line) -> float:
        answer = self.ask(line.load._asdict())
        return line.value(self.ask({}) if line.name == MEMORY else answer, line.load)

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> Answer:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise SystemExit(f"{' '.join(self._process.args)} ended with {self._process.wait()}")  # type: ignore[arg-type]
        answer: Answer = json.loads(text)
        return answer


@contextmanager
def system(name: str, model: Path, lines: tuple[Line, ...], args: argparse.Namespace) -> Iterator[System]:
    """A process that is warm: it has run a load of each kind."""
    num_seqs = max(line.load.concurrency for line in lines)
    own = [sys.executable, "-m", "benchmarks.edge.ours"] if name == "oscine" else [args.python, str(HERE / "llama.py")]
    made = System([*own, *map(str, (model, _CONTEXT, num_seqs, args.threads))], args.threads, args.folder / "cache")
    try:
        for line in lines:
            made.ask(line.load._replace(osl=2)._asdict())
        yield made
    finally:
        made.close()


def measure(model: Path, lines: tuple[Line, ...], args: argparse.Namespace, together: bool) -> Best:
    """The best value of each line and system. `together`: both systems stay in memory."""
    values: dict[str, dict[str, list[float]]] = {line.name: {name: [] for name in args.systems} for line in lines}
    with ExitStack() as stack:
        kept: dict[str, System] = {}
        for number in range(args.rounds):
            for name in args.systems:
                with ExitStack() as own:
                    if name not in kept:
                        running = (stack if together else own).enter_context(system(name, model, lines, args))
                        kept |= {name: running} if together else {}
                    else:
                        running = kept[name]
                    for line in lines:
                        values[line.name][name].append(value := running.measure(line))
                        print(f"round {number + 1}: {name:9} {line.name}: {value:.2f} {line.unit}", flush=True)
    best = {line.name: max if line.more_is_better else min for line in lines}
    return {line: {name: best[line](found) for name, found in each.items()} for line, each in values.items()}


def row(prefix: str, line: Line, found: Mapping[str, float], args: argparse.Namespace) -> dict[str, Any]:
    """A row of results. A ratio above 1 means that Oscine is better."""
    where, both = describe("cpu", args.commit), [found.get(name) for name in SYSTEMS]
    ours, theirs = both
    ratio = ours and theirs and (ours / theirs if line.more_is_better else theirs / ours)
    values = zip(("oscine", "llama_cpp", "ratio"), (ours, theirs, ratio), strict=True)
    return {
        "line": f"{prefix} {line.name}",
        **{name: value and round(value, 3) for name, value in values},
        "unit": line.unit,
        "threads": args.threads,
        "cpu": _cpu(),
        "commit": where.commit,
        "date": where.date,
    }


def _cpu() -> str:
    names = [text for text in Path("/proc/cpuinfo").read_text().splitlines() if text.startswith("model name")]
    return names[0].partition(": ")[2] if names else os.uname().machine


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.edge", description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of 20b (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="number of turns per system (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="number of threads per system (default: all cores)"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=("20b", "nano"),
        default=("20b", "nano"),
        help="models to measure (default: both)",
    )
    parser.add_argument(
        "--lines",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="measure lines that contain a TEXT (default: all lines)",
    )
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="systems to measure (default: both)"
    )
    parser.add_argument(
        "--python",
        default=".venv-edge/bin/python",
        help="interpreter that has llama-cpp-python (default: %(default)s)",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/edge"), help="folder for the models (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="file that rows are appended to (default: %(default)s)"
    )
    parser.add_argument("--commit", help="commit of the rows (default: that of the working tree)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    size = "20b" if args.layers == LAYERS else f"20b ({args.layers} layers)"
    for model in args.models:
        every = SMALL if model == "nano" else BIG
        lines = tuple(line for line in every if any(text in line.name for text in args.lines))
        if not lines:
            continue
        path = files.embedded(args.folder) if model == "nano" else files.published(args.folder, args.layers)
        found = measure(path, lines, args, together=model == "nano" or args.layers <= _FEW)
        with args.output.open("a") as out:
            for line in lines:
                made = row(model if model == "nano" else size, line, found[line.name], args)
                print(json.dumps(made), file=out)
                print(f"{made['line']}: {made['oscine']} / {made['llama_cpp']} {line.unit}, ratio {made['ratio']}")


if __name__ == "__main__":
    main()
