"""Whether a deployment has room on the machines of a cluster, before anything starts.

What is refused cannot be placed on the machines that are there: each rule is a bound that every placement keeps.
Machines that an autoscaler would add do not count. What passes may have to wait for other programs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import floor

from oscine.extensions.replicas.spec.deployment import Deployment, ModelSpec, RolePart, RoleSpec

_SLACK = 1e-6  # of sums of fractions


@dataclass(frozen=True, slots=True)
class Machine:
    address: str
    resources: Mapping[str, float]  # CPU, GPU and custom resources; in total, or what is free of them
    labels: Mapping[str, str] = field(default_factory=dict)


def needs_of(role: RoleSpec) -> dict[str, float]:
    """What a replica takes of its machine, by resource."""
    found = {"CPU": role.cpus, "GPU": role.gpus}
    if role.resource:
        found[role.resource] = 1.0
    return {kind: number for kind, number in found.items() if number}


def misfit(deployment: Deployment, machines: list[Machine], *, free: bool = False) -> str | None:
    """Why the fewest replicas of all roles find no room, with the arithmetic in one line; None if they may.

    `free`: whether the resources of `machines` are what is free of them, as the text then says.
    """
    roles = [(model, role) for model in deployment.models for role in model.roles if role.replicas.min]
    for model, role in roles:
        for part in role.parts:
            found = _misfit_of_part(model, role, part, machines, free)
            if found is not None:
                return found
    takers = [("the replicas", role.replicas.min, needs_of(role)) for _, role in roles]
    takers += [
        (name, count, {resource: 1.0})
        for name, count, resource in (
            ("the ingress", deployment.ingress_replicas, deployment.ingress_resource),
            ("the router", 1, deployment.router_resource),
        )
        if resource
    ]
    for kind in {kind: None for _, _, needs in takers for kind in needs}:
        takers_of_kind = [(name, count, needs[kind]) for name, count, needs in takers if kind in needs]
        found = _misfit_of_kind(kind, takers_of_kind, machines, free)
        if found is not None:
            return found
    return None


def _misfit_of_kind(kind: str, takers: list[tuple[str, int, float]], machines: list[Machine], free: bool) -> str | None:
    """Why all machines together have too little of `kind`; None if they have enough.

    `takers`: what takes it, how many of these there are, and what each takes.
    """
    is_custom = kind not in ("CPU", "GPU")  # then each takes 1, and none is divided among machines
    there = sum(
        floor(one.resources.get(kind, 0.0) + _SLACK) if is_custom else one.resources.get(kind, 0.0) for one in machines
    )
    counts: dict[tuple[str, float], int] = {}  # by what takes it, and how much of it
    for name, count, each in takers:
        counts[name, each] = counts.get((name, each), 0) + count
    wanted = sum(count * each for (_, each), count in counts.items())
    if wanted <= there + _SLACK:
        return None
    terms = " + ".join(f"{count} x {each:g}" for (_, each), count in counts.items())
    *first, last = dict.fromkeys(name for name, _, _ in takers)
    who = f"{', '.join(first)} and {last}" if first else last
    verb = "take" if first or last == "the replicas" else "takes"
    has = f"room for {there}{' more' if free else ''}" if is_custom else f"{there:g}{' free' if free else ''} together"
    return f"{who} {verb} {terms} = {wanted:g} {kind}, and {_machines(machines)} {has}"


def _misfit_of_part(
    model: ModelSpec, role: RoleSpec, part: RolePart, machines: list[Machine], free: bool
) -> str | None:
    needs, count = needs_of(role), part.replicas.min
    what = f"{model.name}, {role.role}: a replica takes {', '.join(f'{n:g} {kind}' for kind, n in needs.items())}"
    if part.labels:
        named = ",".join(f"{key}={value}" for key, value in part.labels.items())
        what += f" on a machine with {named}"
        machines = [one for one in machines if part.labels.items() <= dict(one.labels).items()]
        if not machines:
            return f"{what}, and no machine has these labels"
    for kind, number in needs.items():
        most = max((machine.resources.get(kind, 0.0) for machine in machines), default=0.0)
        if number > most + _SLACK:
            what_is = f"{most:g} {kind}{' free' if free else ''}"
            rule = "; all GPUs of an engine are in one machine" if kind == "GPU" and number > 1 else ""
            return f"{what}, and no {'such ' if part.labels else ''}machine has more than {what_is}{rule}"
    rooms = [_room(role, machine) for machine in machines]
    if sum(rooms) < count:
        bound = f" ({role.max_replicas_per_node} per machine at most)" if role.max_replicas_per_node else ""
        terms = ", ".join(f"{machine.address}: {room}" for machine, room in zip(machines, rooms, strict=True))
        where = "in what is free" if free else "on empty machines"
        return f"{what}{bound}, so {sum(rooms)} of {count} have room {where} ({terms})"
    return None


def _room(role: RoleSpec, machine: Machine) -> int:
    """Replicas that the machine's resources suffice for."""
    most = min(floor(machine.resources.get(kind, 0.0) / each + _SLACK) for kind, each in needs_of(role).items())
    return min(most, role.max_replicas_per_node or most)


def _machines(machines: list[Machine]) -> str:
    return "1 machine has" if len(machines) == 1 else f"{len(machines)} machines have"
