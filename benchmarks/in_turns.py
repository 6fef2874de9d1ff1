"""Runs `oscine bench engine` with several releases of the code or of Triton, by turns, on one GPU.

    python -m benchmarks.in_turns --variant before=/tmp/before --variant now=. --variant newest=.:/tmp/triton-3.9 \
        --rounds 5 --seconds 560 --output runs/turns.jsonl -- --model 120b --points 1:1024:256 64:1024:64

A variant is a name and a PYTHONPATH. Each round runs every variant once; every second round reverses the order. From
the third round on, a round begins only if it is expected to end within --seconds. The table has the median of each
figure, and its ratio to the first variant's. The spread is the range of a variant's rounds over their median.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

FIGURES = ("output_tok_s", "prefill_tok_s", "decode_step_ms", "first_token_ms", "ready_s")
Results = dict[tuple[str, str], dict[str, list[float]]]  # (point, figure) -> variant -> rounds


def measure(name: str, path: str, options: list[str]) -> list[dict[str, Any]]:
    """One line per point. Raises subprocess.CalledProcessError."""
    places = [str(Path(place).resolve()) for place in path.split(":")]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "results.jsonl")
        command = [sys.executable, "-m", "oscine", "bench", "engine", *options, "--output", str(output)]
        environment = os.environ | {"PYTHONPATH": ":".join(places)}
        subprocess.run(
            [*command, "--commit", name], cwd=places[0], env=environment, check=True, stdout=subprocess.DEVNULL
        )
        return [json.loads(line) | {"variant": name} for line in output.read_text().splitlines()]


def add(results: Results, lines: list[dict[str, Any]]) -> None:
    for line in lines:
        point = f"{line['model']} {line['concurrency']}:{line['isl']}:{line['osl']}"
        for figure in FIGURES:
            if line.get(figure) is not None:
                results[point, figure][line["variant"]].append(line[figure])


def table(results: Results, variants: list[str]) -> str:
    rows = []
    for (point, figure), by_variant in results.items():
        base = statistics.median(by_variant[variants[0]])
        cells = []
        for variant in variants:
            rounds = by_variant[variant]
            middle = statistics.median(rounds)
            spread = (max(rounds) - min(rounds)) / middle
            cells.append(f"{variant} {middle:,.1f} ({middle / base:.3f}, spread {spread:.3f})")
        rows.append(f"{point} {figure}: " + "; ".join(cells))
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", action="append", required=True, metavar="NAME=PYTHONPATH", help="may be repeated")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time for all rounds (default: no limit)")
    parser.add_argument("--output", type=Path, required=True, help="JSON Lines file that results are appended to")
    parser.add_argument("options", nargs="+", help="options of oscine bench engine, after --")
    args = parser.parse_args()
    variants = dict(variant.split("=", 1) for variant in args.variant)
    results: Results = defaultdict(lambda: defaultdict(list))
    begin_s = time.monotonic()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for index in range(args.rounds):
        elapsed_s = time.monotonic() - begin_s
        if index and elapsed_s * (index + 1) / index > args.seconds:
            break
        order = list(variants)[:: -1 if index % 2 else 1]
        for name in order:
            lines = measure(name, variants[name], args.options)
            with args.output.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            add(results, lines)
        print(f"round {index + 1} after {time.monotonic() - begin_s:.0f} s", flush=True)
    print(table(results, list(variants)))


if __name__ == "__main__":
    main()
