"""The cohort does what production does, step by step, on random loads; and it is production, but for named methods."""

import pytest

from oscine.engine.core.kv_cache_manager import KVCacheManager
from oscine.engine.core.loop import EngineLoop
from oscine.engine.core.prefix_index import PrefixIndex
from oscine.engine.core.scheduler import ScheduledStep, Scheduler
from oscine.extensions.plan.clock.agenda import Clock
from oscine.extensions.plan.engine.cohort import CohortPlan, CohortScheduler, CohortStep
from oscine.extensions.plan.engine.cohort_loop import CohortLoop
from oscine.extensions.plan.engine.tokens import AddressedIndex
from oscine.types import StepPlan
from tests.extensions.plan.fleets import deployment
from tests.extensions.plan.random_load import prove

LOADS, AT_ONCE = 280, 40  # `make sim` takes the next 2,720, `make sim-long` 30,000 others


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, LOADS, AT_ONCE))
def test_the_cohort_and_its_jumps_equal_production_on_random_loads(first: int) -> None:
    proof = prove(range(first, first + AT_ONCE))
    assert proof.num_preemptions > 10
    assert proof.num_jumped > 200


def overridden(subclass: type, parent: type) -> set[str]:
    names = {name for name in vars(subclass) if not name.startswith("__") or name == "__init__"}
    return {name for name in names if name in dir(parent) and name not in ("__slots__", "_executor", "_scheduler")}


@pytest.mark.parametrize(
    ("subclass", "parent", "names"),
    [
        (
            *(CohortScheduler, Scheduler),
            "__init__ _new_step schedule _schedule_decodes _schedule _start _preempt _vacate",
        ),
        (CohortLoop, EngineLoop, "__init__ _advance _commit"),
        (AddressedIndex, PrefixIndex, "extend_digests"),
        (CohortStep, ScheduledStep, "__init__ is_empty"),
        (CohortPlan, StepPlan, "__init__ num_tokens"),
    ],
)
def test_a_subclass_overrides_exactly_these_names(subclass: type, parent: type, names: str) -> None:
    assert subclass.__mro__[1] is parent
    assert overridden(subclass, parent) == set(names.split())


def test_the_cache_of_a_simulated_engine_is_the_cache_of_production() -> None:
    _, specs = deployment()
    loop = specs["aggregated"].loop(Clock(), "jumps")
    assert type(loop) is CohortLoop
    assert type(loop.cache) is KVCacheManager
    assert type(specs["aggregated"].loop(Clock(), "steps")) is EngineLoop
