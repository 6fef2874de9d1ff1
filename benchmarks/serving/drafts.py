"""A server with drafts beside its simulation.

    python -m benchmarks.serving.drafts --steps drafts.jsonl --output runs.csv

`oscine profile` measures the steps of an engine with an EAGLE-3 head, unless the file --steps exists. Then `oscine
bench serve` sends loads to a server with the same options, and the same loads are simulated. The errors are
printed (simulated / measured - 1).

The weights are random, and the drafts of a random head are never accepted. So a module that Python imports at its start
(sitecustomize) has the engine's process replace the target's samples: a draft is accepted with the probability of
--acceptance if all drafts before it are. This adds one small kernel launch per step. The answers are meaningless.
"""

import argparse
import csv
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.draft_head import ForcedAcceptance, write_head
from benchmarks.serving.server import Server
from oscine.checkpoint.hub import PUBLISHED
from oscine.extensions.bench.machine import find_commit
from oscine.extensions.plan.sources.noted import NotedTable
from oscine.extensions.plan.validate.served_runs import ServedRun, lines, off
from oscine.timing.read import read_table

ROOT = Path(__file__).parents[2]
FORCED = "BENCHMARK_FORCED_DRAFTS"  # a variable of the engine's environment
HOOK = """import sys
if "oscine.engine.process.server" in sys.orig_argv:
    import os, traceback
    try:
        from benchmarks.serving.drafts import force
        force()
    except Exception:  # else Python would go on without it
        traceback.print_exc()
        os._exit(1)
"""


def force() -> None:
    """Has drafts accepted with the probability in FORCED: in the engine's process, before it builds the engine."""
    device, drafts, acceptance = json.loads(os.environ[FORCED])
    ForcedAcceptance(device, drafts).set(tuple(acceptance**place for place in range(1, drafts + 1)))


def forced(folder: Path, options: argparse.Namespace) -> dict[str, str]:
    """The environment of a server whose engine forces acceptance. Writes a module to the folder."""
    (folder / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, FORCED: json.dumps([options.device, options.drafts, options.acceptance])}


def oscine(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "oscine", *arguments], check=True)


def measured(options: argparse.Namespace, server: Server, gpu: str) -> Iterator[ServedRun]:
    """Sends each load with `oscine bench serve`; yields the results."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    loads = [*((users, None) for users in options.users), *((None, rate) for rate in options.rates)]
    for seed, (users, rate) in enumerate(loads, options.seed):  # a new seed per load, so that no prompt is cached
        row = served_row(server.url, options, users, rate, seed)
        yield ServedRun(
            model=options.model,
            gpu=gpu,
            tensor_parallel_size=1,
            users=users,
            rate=rate,
            burst=1,
            prompt=options.isl,
            answer=options.osl,
            spread=options.spread,
            seed=seed,
            requests=options.requests,
            tpot_ms=round(row["median_tpot"] * 1e3, 4),
            tokens_per_s=round(row["output_tput_per_gpu"], 1),
            ttft_p90_ms=round(row["p90_ttft"] * 1e3, 2),
            commit=find_commit(),
            date=today,
            machine=options.machine,
            drafts=options.drafts,
            acceptance=options.acceptance,
        )
        steps, accepted = (
            server.metric(f"oscine:spec_decode_num_{name}_total") for name in ("drafts", "accepted_tokens")
        )
        length = 1 + accepted / max(steps, 1)
        print(f"since the server's start: {steps:,.0f} verified, mean length {length:.2f}", flush=True)


def served_row(
    url: str, options: argparse.Namespace, users: int | None, rate: float | None, seed: int
) -> dict[str, Any]:
    load = ("--concurrency", users) if rate is None else ("--rate", rate)
    lengths = "--isl", options.isl, "--osl", options.osl, "--spread", options.spread
    others = "--seed", seed, "--sessions", options.requests
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.jsonl"
        prompts = "--api", "completions", "--token-ids", "--ignore-eos"  # exactly --isl tokens, as in the simulation
        oscine("bench", "serve", url, *prompts, "--output", str(file), *map(str, (*load, *lengths, *others)))
        row: dict[str, Any] = json.loads(file.read_text())
        return row


def append(file: Path, run: ServedRun) -> None:
    """Appends a line of served_runs.csv, to a new file with its header."""
    is_new = not file.exists()
    with file.open("a", newline="") as opened:
        writer = csv.DictWriter(opened, asdict(run), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(asdict(run))


def main() -> None:
    options = arguments()
    found: list[ServedRun] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_head(folder, PUBLISHED[options.model]())
        drafts = json.dumps({"method": "eagle3", "model": name, "num_speculative_tokens": options.drafts})
        engine = "--device", options.device, "--speculative-config", drafts
        if not options.steps.exists():
            seconds, steps = str(options.seconds), str(options.steps)
            oscine("profile", "--model", options.model, *engine, "--seconds", seconds, "--output", steps)
        table = read_table(options.steps, scaled=True)
        server = "--random-weights", options.model, *engine, "--log-level", "warning"
        with Server(*server, ready_timeout_s=300, environment=forced(folder, options)) as started:
            for run in measured(options, started, table.header.gpu):
                found.append(run)
                if options.output is not None:
                    append(options.output, run)
    print("\n".join(lines(off(NotedTable(table), run) for run in found)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=Path, required=True, help="table of `oscine profile`; made if it is missing")
    parser.add_argument("--output", type=Path, help="file to which runs are appended, as lines of served_runs.csv")
    parser.add_argument(
        "--model", default="120b", choices=tuple(PUBLISHED), help="shapes of the model (default: %(default)s)"
    )
    parser.add_argument("--device", default="cuda", help="as of `oscine serve` (default: %(default)s)")
    parser.add_argument(
        "--drafts", type=int, default=5, help="most drafts per sequence and step (default: %(default)s)"
    )
    parser.add_argument(
        "--acceptance",
        type=float,
        default=0.7,
        help="probability that a draft is accepted if all before it are (default: %(default)s)",
    )
    parser.add_argument(
        "--users", type=int, nargs="*", default=[64], help="numbers of concurrent users, a load each (default: 64)"
    )
    parser.add_argument(
        "--rates", type=float, nargs="*", default=[8.0], help="requests per second, a load each (default: 8)"
    )
    parser.add_argument("--requests", type=int, default=384, help="requests per load (default: %(default)s)")
    parser.add_argument("--isl", type=int, default=1024, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--osl", type=int, default=256, help="generated tokens (default: %(default)s)")
    parser.add_argument(
        "--spread", type=float, default=0.3, help="random spread of both lengths, as a share (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the first load; each later one adds 1 (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="seconds that the profile may take (default: %(default)s)"
    )
    parser.add_argument("--machine", default="?", help="name of the machine in the output")
    return parser.parse_args()


if __name__ == "__main__":
    main()
