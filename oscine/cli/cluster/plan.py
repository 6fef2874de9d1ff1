"""`oscine cluster plan FILE --load LOAD.jsonl`: what scaling would have done with a recorded load, and why.

Knows arguments and what is printed. Needs no Ray and starts nothing.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from oscine.cli.error import USAGE, CommandError
from oscine.cli.parser import Parser

if TYPE_CHECKING:
    from oscine.cluster.scaling.load_record import PoolPlan


def add_command(verbs: "argparse._SubParsersAction[Parser]") -> None:
    what = "print what scaling would have done with a recorded load, and why"
    plan = verbs.add_parser("plan", help=what, allow_abbrev=False)
    plan.add_argument("file", metavar="FILE", type=Path, help="deployment file (YAML)")
    plan.add_argument(
        "--load", metavar="LOAD", type=Path, required=True, help="file of JSON lines that `oscine cluster record` wrote"
    )
    plan.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> None:
    from oscine.cli.cluster.deployment_file import read_deployment
    from oscine.cluster.scaling.load_record import plans, read_lines

    deployment = read_deployment(args.file)
    try:
        for plan in plans(read_lines(args.load), deployment):
            print("\n".join(told(plan)))
    except (OSError, ValueError) as error:
        raise CommandError(f"{args.load}: {error}", USAGE) from None


def told(plan: "PoolPlan") -> list[str]:
    lines = [f"{plan.model}, {plan.role}: {plan.first} at the start"]
    lines += [f"  +{step.time_s:6.0f} s  {step.before} -> {step.after}  {step.reason}" for step in plan.steps]
    hours, recorded = plan.replica_s / 3600, plan.recorded_s / 3600
    return [*lines, f"  {hours:.2f} replica-hours; the recorded load had {recorded:.2f}"]
