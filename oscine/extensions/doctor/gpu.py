"""`oscine doctor --gpu`: the checks to run once on a kind of GPU that was never tried, and the file to send back.

Each part is a process of its own. So one that crashes or hangs costs only itself, and the file says how it ended. If
that is the check of all ops, each op is then checked in a process of its own, beside references for the others.
"""

import argparse
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oscine.cli.error import FAILED, USAGE, WRONG, CommandError
from oscine.extensions.doctor.checks import diagnose, report
from oscine.extensions.doctor.facts import Facts, GpuFacts, gather
from oscine.system.python_child import child_environment, module_command

TOTAL_S = 600
ALONE_S = 40  # that an op gets by itself, most of them for imports and weights
CHECKED = ("embed", "norm_qkv", "attention", "out_proj", "norm_route", "moe", "rms_norm", "lm_head")
LEAST_S = 20  # that a part gets, however little is left
OPS = "1,8,64,512,1024,8192"
POINTS = ("1:1024:128", "1:8192:128", *(f"{count}:1024:128" for count in (2, 4, 8, 16, 32, 64, 128, 256)))
_MODEL_BYTES = {"120b": 72e9, "20b": 20e9}  # of a GPU that holds the model and some cache
_CHECK = "oscine.extensions.bench.ops_check"


@dataclass(frozen=True, slots=True)
class Part:
    title: str
    module: str
    arguments: tuple[str, ...]
    most_s: float
    pieces: tuple["Part", ...] = ()  # that run instead if it fails or hangs

    @property
    def command(self) -> list[str]:
        return [*module_command(self.module), *self.arguments]


@dataclass(frozen=True, slots=True)
class Outcome:
    part: Part
    ended: str  # in words
    seconds: float
    said: str

    @property
    def succeeded(self) -> bool:
        return self.ended == "done"

    @property
    def was_cut_short(self) -> bool:
        """Whether it failed or hung, and so has not said what is wrong."""
        return self.ended not in ("done", f"exit status {WRONG}")

    @property
    def line(self) -> str:
        return f"{self.part.title}: {self.ended}, {self.seconds:.0f} s"


def run(args: argparse.Namespace) -> None:
    facts = gather()
    if not facts.gpus:
        raise CommandError("--gpu needs an NVIDIA GPU that nvidia-smi shows, and a driver", USAGE)
    if args.json:
        raise CommandError("--gpu writes a text file; leave out --json", USAGE)
    gpu = facts.gpus[0]
    output = args.output or Path(f"oscine-gpu-{_plain(gpu.name)}-{time.strftime('%Y%m%d-%H%M')}.txt")
    outcomes = examine(facts, parts(gpu), output, lambda line: print(line, flush=True))
    failed = [outcome.part.title for outcome in outcomes if not outcome.succeeded]
    print(f"written to {output}; read it before you send it: the home folder and the host's name are replaced")
    if failed:
        raise CommandError(f"not all parts ended well: {', '.join(failed)}; see {output}", FAILED)


def parts(gpu: GpuFacts) -> list[Part]:
    """In the order of their importance. The engine runs the larger model that fits."""
    model = next((name for name, least in _MODEL_BYTES.items() if gpu.total >= least), "20b")
    engine = ("bench", "engine", "--model", model, "--output", "/dev/null", "--points", *POINTS)
    return [
        _check("120b"),
        _check("20b"),
        _check("20b", "--activation-dtype", "fp8"),
        _times("120b"),
        Part(f"engine, {model} with random weights", "oscine", engine, 240),
        _times("20b"),
    ]


def _check(model: str, *options: str) -> Part:
    title = " ".join((f"ops of {model}", *options, "beside the references"))
    pieces = tuple(
        Part(f"{op}, {title}", _CHECK, (model, *options, "--only", op), ALONE_S)
        for op in (("moe",) if options else CHECKED)
    )
    return Part(title, _CHECK, (model, *options), 120, pieces)


def _times(model: str) -> Part:
    return Part(f"times of the ops of {model}", "oscine", ("bench", "ops", "--model", model, "--tokens", OPS), 120)


def examine(facts: Facts, of: Sequence[Part], output: Path, say: Callable[[str], None]) -> list[Outcome]:
    """Runs the parts within TOTAL_S, and writes what they said after each of them."""
    end_s, outcomes = time.monotonic() + TOTAL_S, list[Outcome]()
    head = report(diagnose(facts))
    waiting = list(of)
    while waiting:
        part = waiting.pop(0)
        left_s = max(LEAST_S, end_s - time.monotonic())
        outcome = outcome_of(part, min(part.most_s, left_s))
        outcomes.append(outcome)
        if outcome.was_cut_short:
            waiting = [*part.pieces, *waiting]
        say(outcome.line)
        output.write_text("\n\n".join((head, _summary(outcomes), *map(_section, outcomes))) + "\n")
    return outcomes


def outcome_of(part: Part, limit_s: float) -> Outcome:
    start_s = time.monotonic()
    with subprocess.Popen(
        part.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=child_environment(), start_new_session=True
    ) as child:
        try:
            said, _ = child.communicate(timeout=limit_s)
            ended = "done" if child.returncode == 0 else f"exit status {child.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # its workers too, which hold the pipe
            said, _ = child.communicate()
            ended = f"stopped after {limit_s:.0f} s"
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    text = said.decode(errors="replace").replace(str(Path.home()), "~").replace(platform.node() or "\0", "HOST")
    return Outcome(part, ended, time.monotonic() - start_s, text)


def _summary(outcomes: Sequence[Outcome]) -> str:
    return "\n".join(("summary", *(f"  {outcome.line}" for outcome in outcomes)))


def _section(outcome: Outcome) -> str:
    shown = " ".join(("python -m", outcome.part.module, *outcome.part.arguments))
    return f"==== {outcome.line}\n$ {shown}\n{outcome.said.rstrip()}"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
