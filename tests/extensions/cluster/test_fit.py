"""What cannot be placed on the machines of a cluster is said with the arithmetic, before anything starts."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscine.extensions.replicas.spec.deployment import Deployment, ModelSpec, Replicas, RoleSpec
from oscine.extensions.replicas.spec.fit import Machine, misfit, needs_of
from oscine.settings.config import EngineOptions, ModelOptions
from oscine.settings.option import FileKeyError, OptionError


def machine(number: int, cpus: float, gpus: float = 0.0, **more: float) -> Machine:
    return Machine(f"10.0.0.{number}", {"CPU": cpus, "GPU": gpus, **more})


def deployment(*roles: RoleSpec) -> Deployment:
    return Deployment((ModelSpec(("m",), roles),))


def role(count: int, cpus: float = 1.0, gpus: float = 0.0, **more: object) -> RoleSpec:
    engine = EngineOptions(ModelOptions(tensor_parallel_size=max(1, int(gpus))))
    return RoleSpec("decode", engine, Replicas(count, max(1, count)), gpus, cpus=cpus, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("one", "said"), [
    (role(1, 8, 16), "m, decode: a replica takes 8 CPU, 16 GPU, and no machine has more than 8 GPU; all GPUs of an "
                     "engine are in one machine"),
    (role(1, 65), "m, decode: a replica takes 65 CPU, and no machine has more than 64 CPU"),
    (role(1, resource="rack-2"), "m, decode: a replica takes 1 CPU, 1 rack-2, and no machine has more than 0 rack-2"),
    (role(3, 1, max_replicas_per_node=1), "m, decode: a replica takes 1 CPU (1 per machine at most), so 2 of 3 have "
                                          "room on empty machines (10.0.0.1: 1, 10.0.0.2: 1)"),
    (role(3, 8, 5), "m, decode: a replica takes 8 CPU, 5 GPU, so 2 of 3 have room on empty machines "
                    "(10.0.0.1: 1, 10.0.0.2: 1)"),
    (role(2, 8, 8), None),
    (role(0, 1000), None),
    (role(4, 8, 4, resource="rack-1"), "m, decode: a replica takes 8 CPU, 4 GPU, 1 rack-1, so 2 of 4 have room on "
                                       "empty machines (10.0.0.1: 2, 10.0.0.2: 0)"),
])  # fmt: skip
def test_one_role(one: RoleSpec, said: str | None) -> None:
    machines = [machine(1, 64, 8, **{"rack-1": 8}), machine(2, 64, 8)]
    assert misfit(deployment(one), machines) == said


RACKS = [replace(machine(number, 2), labels={"rack": rack, "disk": "ssd"}) for number, rack in enumerate("aabb")]


@pytest.mark.parametrize(("one", "said"), [
    (role(8, labels=("rack=a", "rack=b")), None),
    (role(9, labels=("rack=a", "rack=b")), "m, decode: a replica takes 1 CPU on a machine with rack=a, so 4 of 5 have "
                                           "room on empty machines (10.0.0.0: 2, 10.0.0.1: 2)"),
    (role(1, 3, labels=("rack=b",)), "m, decode: a replica takes 3 CPU on a machine with rack=b, and no such machine "
                                     "has more than 2 CPU"),
    (role(1, labels=("rack=a, disk=hdd",)), "m, decode: a replica takes 1 CPU on a machine with rack=a,disk=hdd, and "
                                            "no machine has these labels"),
    (role(2, max_replicas_per_node=1, labels=("rack=a", "rack=b", "rack=c")), None),
])  # fmt: skip
def test_labels_divide_the_replicas_of_a_role(one: RoleSpec, said: str | None) -> None:
    assert misfit(deployment(one), RACKS) == said


def test_parts_of_a_role_are_as_equal_as_possible() -> None:
    def parts(count: int, *labels: str) -> list[tuple[str, dict[str, str], int]]:
        return [(part.name, part.labels, part.replicas.min) for part in role(count, labels=labels).parts]

    assert parts(5, "rack=a", "rack=b,disk=ssd") == [
        ("decode", {"rack": "a"}, 3),
        ("decode-2", {"rack": "b", "disk": "ssd"}, 2),
    ]
    assert parts(1, "rack=a", "rack=b") == [("decode", {"rack": "a"}, 1)]
    assert parts(2) == [("decode", {}, 2)]


@pytest.mark.parametrize("labels", ["rack", "=a", "rack=", "rack=a,", ""])
def test_labels_have_keys_and_values(labels: str) -> None:
    with pytest.raises(OptionError, match="labels such as rack=a"):
        role(1, labels=(labels,))


def test_replicas_that_scale_are_not_divided() -> None:
    with pytest.raises(FileKeyError, match="labels must be one entry where the number of replicas is not fixed"):
        RoleSpec("decode", replicas=Replicas(1, 2), labels=("rack=a", "rack=b"))


@pytest.mark.parametrize(("there", "said"), [
    ([{"front": 2, "inner": 1}], None),
    ([{"front": 1, "inner": 1}], "the ingress takes 2 x 1 = 2 front, and 1 machine has room for 1"),
    ([{"front": 2}], "the router takes 1 x 1 = 1 inner, and 1 machine has room for 0"),
    ([{"front": 1.5, "inner": 1}, {"front": 0.5}], "the ingress takes 2 x 1 = 2 front, and 2 machines have room "
                                                   "for 1"),
])  # fmt: skip
def test_ingresses_and_the_router_need_their_resources(there: list[dict[str, float]], said: str | None) -> None:
    whole = replace(deployment(role(1)), ingress_replicas=2, ingress_resource="front", router_resource="inner")
    assert misfit(whole, [machine(i, 2, **one) for i, one in enumerate(there)]) == said


@pytest.mark.parametrize(("there", "said"), [
    (5, None),
    (4, "the replicas, the ingress and the router take 3 x 1 + 1 x 1 + 1 x 1 = 5 front, and 1 machine has room for 4"),
])  # fmt: skip
def test_all_that_need_one_resource_are_counted_together(there: float, said: str | None) -> None:
    roles = role(2, resource="front"), role(1, resource="front")
    whole = replace(deployment(*roles), ingress_resource="front", router_resource="front")
    assert misfit(whole, [machine(1, 8, front=there)]) == said


def test_roles_together() -> None:
    two = deployment(role(2, 8, 4), role(1, 4, 8))
    assert misfit(two, [machine(1, 64, 8), machine(2, 64, 8)]) is None
    assert misfit(two, [machine(1, 64, 12)]) == (
        "the replicas take 2 x 4 + 1 x 8 = 16 GPU, and 1 machine has 12 together"
    )


@pytest.mark.parametrize(("one", "said"), [
    (role(1, 3), "m, decode: a replica takes 3 CPU, and no machine has more than 2 CPU free"),
    (role(2, 2), "m, decode: a replica takes 2 CPU, so 1 of 2 have room in what is free (10.0.0.1: 1)"),
    (role(2, 1, resource="front"), "the replicas and the ingress take 2 x 1 + 1 x 1 = 3 front, and 1 machine has room "
                                   "for 2 more"),
])  # fmt: skip
def test_what_is_free_is_named_so(one: RoleSpec, said: str) -> None:
    whole = replace(deployment(one), ingress_resource="front")
    assert misfit(whole, [machine(1, 2, front=2)], free=True) == said


@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=2),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3),
)
def test_what_is_refused_has_no_placement(kinds: list[tuple[int, int, int]], sizes: list[tuple[int, int]]) -> None:
    """Against all placements, tried one by one."""
    roles = [role(count, cpus, gpus) for count, cpus, gpus in kinds]
    machines = [machine(i, *size) for i, size in enumerate(sizes)]
    replicas = [needs_of(one) for one in roles for _ in range(one.replicas.min)]

    def fits(places: tuple[int, ...]) -> bool:
        return all(
            sum(needs.get(kind, 0.0) for needs, place in zip(replicas, places, strict=True) if place == i) <= there
            for i, one in enumerate(machines)
            for kind, there in one.resources.items()
        )

    if misfit(deployment(*roles), machines) is not None:
        assert not any(fits(places) for places in product(range(len(machines)), repeat=len(replicas)))


def test_cpus_and_gpus_are_no_custom_resources() -> None:
    with pytest.raises(FileKeyError, match="resource must be the name of a custom resource"):
        role(1, resource="GPU")
