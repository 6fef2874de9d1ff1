"""`oscine cluster up FILE | status | record | plan | down`: many engines as one, on Ray.

Parses arguments and prints; oscine.extensions.cluster does the work, and needs the extra `oscine[cluster]`.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oscine.cli.error import USAGE, CommandError
from oscine.cli.parser import Parser
from oscine.system.environment import Environment

if TYPE_CHECKING:
    from oscine.extensions.cluster.ray.local import LocalRay
    from oscine.extensions.cluster.scaling.load_record import PoolPlan
    from oscine.extensions.replicas.spec.deployment import Deployment
    from oscine.extensions.replicas.spec.snapshot import ClusterSnapshot, ReplicaSnapshot, RouterCounters

_NOTHING = "no cluster runs (`oscine cluster up FILE` starts one; --ray ADDRESS names one on a Ray of your own)"


def arguments(parser: Parser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="up|status|record|plan|down", required=True)

    def add(verb: str, run: Callable[[argparse.Namespace], None], what: str) -> Parser:
        added = verbs.add_parser(verb, help=what, allow_abbrev=False)
        added.set_defaults(run=run)
        return added

    up = add("up", _guarded(_up), "start what a deployment file says, or change what runs")
    up.add_argument("file", metavar="FILE", type=Path, help="deployment file (YAML); see docs/cluster.md")
    up.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="wait until all of it is ready (default: --wait)",
    )
    status = add("status", _guarded(_status), "print one line per replica")
    status.add_argument("--json", action="store_true", help="print everything that the router knows, as JSON")
    down = add("down", _guarded(_down), "let running requests finish, then stop all that `up` started")
    record = add("record", _guarded(_record), "write down every second what scaling looks at, until ctrl-C")
    record.add_argument(
        "file", metavar="LOAD", type=Path, help="file that JSON lines are appended to, for `oscine cluster plan`"
    )
    plan = add("plan", _plan, "print what scaling would have done with a recorded load, and why; starts nothing")
    plan.add_argument("file", metavar="FILE", type=Path, help="deployment file (YAML)")
    plan.add_argument(
        "--load", metavar="LOAD", type=Path, required=True, help="file of JSON lines that `oscine cluster record` wrote"
    )
    for verb in (status, record, down):
        verb.add_argument(
            "--ray",
            metavar="ADDRESS",
            help="address of a Ray that `up` did not start here; auto is $RAY_ADDRESS (default: the one `up` started)",
        )


def _guarded(run: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], None]:
    """Any exception of Ray ends the command with one line."""

    def guarded(args: argparse.Namespace) -> None:
        if importlib.util.find_spec("ray") is None:
            raise CommandError("a cluster needs Ray: pip install 'oscine[cluster]'")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        from oscine.extensions.cluster.ray.local import ClusterError

        try:
            run(args)
        except ClusterError as error:
            raise CommandError(str(error)) from None
        except Exception as error:
            from oscine.extensions.cluster.ray.control import FAILURES

            if not isinstance(error, FAILURES):
                raise
            raise CommandError(f"the cluster does not answer: {type(error).__name__}: {error}") from None

    return guarded


def _state() -> Path:
    """The file in which `up` notes the Ray that it started."""
    return Environment().state_folder / "oscine" / "cluster.json"


# ---- up ----


def _up(args: argparse.Namespace) -> None:
    from oscine.extensions.cluster.cli.deployment_file import read_deployment, with_secrets_of

    try:
        deployment = with_secrets_of(Environment(), read_deployment(args.file))
    except ValueError as error:
        raise CommandError(str(error), USAGE) from None
    with _ray_for(deployment, args.file):
        from oscine.extensions.cluster.ray import control

        control.up(control.with_secrets(deployment), wait=args.wait, note=_note)
        names = ", ".join(name for model in deployment.models for name in model.names)
        print(
            f"{names} at {control.url()}" if args.wait else f"{names}: `oscine cluster status` tells when it is ready"
        )


@contextlib.contextmanager
def _ray_for(deployment: "Deployment", file: Path) -> Iterator[None]:
    """Makes this process a client of the deployment's Ray. A Ray that is started for it ends if the block fails."""
    from oscine.extensions.cluster.ray import local as local_ray
    from oscine.extensions.replicas.spec.deployment import LOCAL

    if deployment.ray != LOCAL:
        local_ray.connect(deployment.ray)
        _check_machines(file, deployment)
        yield
        return
    with local_ray.alone(_state()):
        running = local_ray.LocalRay.load(_state())
        _check_fits(file, deployment, "cpus", running.num_cpus if running is not None else _num_cpus())
        started = None
        if running is None:
            _note("starting Ray")
            running = started = local_ray.start(_num_cpus())
            started.save(_state())
    try:
        running.connect()
        _check_fits(file, deployment, "gpus", local_ray.num_gpus())
        _check_machines(file, deployment)
        yield
    except BaseException:
        if started is not None:
            _end(started)
        raise


def _check_fits(file: Path, deployment: "Deployment", kind: Literal["cpus", "gpus"], there: float) -> None:
    """Raises CommandError if the replicas ask for more than this machine has."""
    roles = (role for model in deployment.models for role in model.roles)
    wanted = sum(role.replicas.min * getattr(role, kind) for role in roles)
    if wanted > there:
        rule = f"the replicas ask for {wanted:g} {kind[:-1].upper()}s, and this machine has {there:g}"
        raise CommandError(f"{file}: {kind}: {rule}: give each fewer (0.5 is allowed)", USAGE)


def _check_machines(file: Path, deployment: "Deployment") -> None:
    """Raises CommandError if the replicas cannot be placed on the machines of the connected Ray."""
    from oscine.extensions.cluster.ray import local as local_ray
    from oscine.extensions.replicas.spec.fit import misfit

    reason = misfit(deployment, local_ray.machines())
    if reason is not None:
        raise CommandError(f"{file}: {reason}", USAGE)


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end(ray: "LocalRay") -> None:
    from oscine.extensions.cluster.ray import local as local_ray

    local_ray.disconnect()
    with local_ray.alone(_state()):
        ray.end(_state())


def _note(text: str) -> None:
    print(text, flush=True)


# ---- with a cluster that runs ----


def _connect(address: str | None) -> "LocalRay | None":
    """Connects to the running cluster. Raises CommandError if there is none."""
    from oscine.extensions.cluster.ray import local as local_ray

    if address is not None:
        local_ray.connect(address)
        running = None
    else:
        with local_ray.alone(_state()):
            running = local_ray.LocalRay.load(_state())
        if running is None:
            raise CommandError(_NOTHING)
        running.connect()
    from oscine.extensions.cluster.ray import control

    if running is None and not control.running():
        raise CommandError(_NOTHING)
    return running


def _status(args: argparse.Namespace) -> None:
    _connect(args.ray)
    from oscine.extensions.cluster.ray import control

    state = control.state()
    if args.json:
        print(json.dumps(asdict(state), indent=2))
        return
    for app in state.apps:
        print(f"{app.name}: {app.status}{f' ({app.message})' if app.message else ''}")
    if state.snapshot is not None:
        print("\n".join(table(state.snapshot)))
    if state.url is not None:
        print(f"ingress: {state.url}")


def _record(args: argparse.Namespace) -> None:
    _connect(args.ray)
    from oscine.extensions.cluster.ray import control
    from oscine.extensions.cluster.scaling.load_record import Recorder
    from oscine.extensions.cluster.scaling.policy import EVERY_S

    recorder = Recorder()
    with args.file.open("a") as file:
        while True:
            snapshot = control.state().snapshot
            if snapshot is not None:
                file.writelines(f"{line}\n" for line in recorder.take(snapshot))
                file.flush()
            time.sleep(EVERY_S)


def _down(args: argparse.Namespace) -> None:
    ray = _connect(args.ray)
    from oscine.extensions.cluster.ray import control

    control.down(_note)
    if ray is not None:
        _end(ray)
    print("nothing runs any more")


# ---- plan ----


def _plan(args: argparse.Namespace) -> None:
    from oscine.extensions.cluster.cli.deployment_file import read_deployment
    from oscine.extensions.cluster.scaling.load_record import plans, read_lines

    deployment = read_deployment(args.file)
    try:
        for plan in plans(read_lines(args.load), deployment):
            print("\n".join(_told(plan)))
    except (OSError, ValueError) as error:
        raise CommandError(f"{args.load}: {error}", USAGE) from None


def _told(plan: "PoolPlan") -> list[str]:
    lines = [f"{plan.model}, {plan.role}: {plan.first} at the start"]
    lines += [f"  +{step.time_s:6.0f} s  {step.before} -> {step.after}  {step.reason}" for step in plan.steps]
    hours, recorded = plan.replica_s / 3600, plan.recorded_s / 3600
    return [*lines, f"  {hours:.2f} replica-hours; the recorded load had {recorded:.2f}"]


# ---- status ----

_COLUMNS = ("MODEL", "ROLE", "REPLICA", "NODE", "STATE", "RUNNING", "WAITING", "KV USE", "HIT RATE", "TOKENS/S")


def table(snapshot: "ClusterSnapshot") -> list[str]:
    """One line per replica, in columns; then one per model."""
    rows = [_COLUMNS, *(_row(replica) for replica in snapshot.replicas)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines + [_route(router, snapshot.queued.get(router.model, 0)) for router in snapshot.routers]


def _route(router: "RouterCounters", waiting: int) -> str:
    share = router.overlap_tokens / router.known_tokens if router.known_tokens else 0.0
    return (
        f"{router.model}: {router.placed} requests placed, {router.remote_prefills} with a prefill replica, "
        f"{share:.0%} of their tokens found in caches; {waiting} wait, {router.refused} refused"
    )


def _row(replica: "ReplicaSnapshot") -> tuple[str, ...]:
    stats = replica.stats
    hits = f"{stats.prefix_hits / stats.prefix_queries:.0%}" if stats.prefix_queries else "-"
    load = str(stats.num_running), str(stats.num_waiting), f"{stats.kv_usage:.0%}", hits, f"{replica.tokens_s:.0f}"
    return replica.model, replica.role, replica.replica, replica.node, replica.state, *load
