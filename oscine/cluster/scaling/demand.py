"""The replicas that a load needs: one number per resource, with the reason in words.

Needs are absolute: they come from the load and the capacity of a replica, not from the present replicas. So they do not
change while new replicas start, and need no damping.
"""

import math
from dataclasses import dataclass

from oscine.cluster.scaling.measured_capacity import MeasuredCapacity
from oscine.cluster.scaling.pool_load import PoolLoad
from oscine.cluster.spec.deployment import ModelSpec, RoleSpec
from oscine.types import Role

# Of a replica's sequences, and of its tokens/s of prompts: arrivals come in clusters, and beyond this many wait.
TARGET_USE = 0.8
TARGET_PAGES = 0.85  # running sequences grow, and one that finds no page is computed again
TARGET_ITL = 0.9  # of the level: a mean at the level is beyond it half of the time
# The margin of fewer replicas: a tenth for errors of measurement, and a quarter of a replica for small loads, which
# vary more.
MARGIN, MARGIN_REPLICAS = 1.1, 0.25


@dataclass(frozen=True, slots=True)
class Goals:
    """The goals of a pool, from the deployment file."""

    role: Role
    ttft_s: float
    itl_s: float
    up_cooldown_s: float
    down_cooldown_s: float
    idle_s: float


def goals_of(model: ModelSpec, role: RoleSpec) -> Goals:
    levels, scaling = model.levels, model.scaling
    return Goals(role.role, levels.ttft_s, levels.itl_s, scaling.up_cooldown_s, scaling.down_cooldown_s, scaling.idle_s)


@dataclass(frozen=True, slots=True)
class Need:
    replicas: float
    why: str


def needs(
    load: PoolLoad, goals: Goals, measured: MeasuredCapacity, start_s: float, *, cautious: bool = False
) -> list[Need]:
    """The present needs, for which replicas are started. `start_s`: until a new one helps. A backlog that is gone by
    then is no reason to start one. So of the waiting requests only the part counts that must be done by then.
    """
    horizon_s = goals.ttft_s + start_s
    sequences = _wanted_sequences(load, horizon_s)
    found = [_sequences(load, sequences, goals, measured, cautious=cautious), _pages(load, sequences, goals)]
    if goals.role != "decode":
        found.append(_prompts(load, measured, horizon_s))
    return [need for need in found if need is not None]


def cautious_needs(load: PoolLoad, goals: Goals, measured: MeasuredCapacity, start_s: float) -> list[Need]:
    """The needs with a margin: the replicas that remain after a step down must satisfy them."""
    found = needs(load, goals, measured, start_s, cautious=True)
    return [Need(need.replicas * MARGIN + MARGIN_REPLICAS, need.why) for need in found]


def lateness(load: PoolLoad, goals: Goals, measured: MeasuredCapacity) -> str | None:
    """The service level that is missed although it could be met."""
    ttft_s = load.mean("first_token_s", "first_tokens")
    if goals.role != "decode" and ttft_s is not None and ttft_s > goals.ttft_s and load.total("waiting") >= 0.5:
        return f"first tokens take {ttft_s:.2g} s, the level is {goals.ttft_s:.2g} s, and requests wait"
    itl_s = load.mean("inter_token_s", "inter_tokens")
    attainable = measured.attainable(goals.itl_s)
    if goals.role != "prefill" and itl_s is not None and itl_s > goals.itl_s and attainable:
        return f"further tokens take {itl_s * 1e3:.0f} ms, the level is {goals.itl_s * 1e3:.0f} ms"
    return None


def _wanted_sequences(load: PoolLoad, horizon_s: float) -> float:
    """Running sequences, plus those that must run so that all waiting ones begin within horizon_s.

    The time of a request follows from the number that run and the number that begin per second (Little's law).
    """
    running, window_s = load.total("running"), max((r.window_s for r in load.replicas), default=0.0)
    begun = load.total("first_tokens")
    turn_s = running * window_s / begun if begun > 0 else horizon_s
    return running + (load.requests - running) * min(1.0, turn_s / horizon_s)


def _sequences(
    load: PoolLoad, wanted: float, goals: Goals, measured: MeasuredCapacity, *, cautious: bool
) -> Need | None:
    """Replicas needed for sequences, with few enough per replica to keep the ITL."""
    bears, why = math.inf, ""
    slots = max((r.max_num_seqs for r in load.replicas), default=0.0)
    if slots > 0:
        bears, why = TARGET_USE * slots, f"{TARGET_USE:.0%} of its {slots:.0f} sequences"
    if goals.role != "prefill":
        in_time = TARGET_ITL * measured.sequences(goals.itl_s, cautious=cautious)
        if in_time < bears:
            bears, why = in_time, f"with further tokens within {goals.itl_s * 1e3:.0f} ms"
    if math.isinf(bears) or not load.requests:
        return None
    waiting = load.requests - load.total("running")
    return Need(
        wanted / bears,
        f"{load.total('running'):.1f} requests run and {waiting:.1f} wait, and a replica bears {bears:.1f} ({why})",
    )


def _pages(load: PoolLoad, wanted: float, goals: Goals) -> Need | None:
    """Waiting requests will need as many pages as running ones; in a prefill pool, prompts wait for their turn."""
    held, running = load.total("kv_usage"), load.total("running")
    if held <= 0:
        return None
    if goals.role != "prefill" and running >= 1:
        held *= max(1.0, wanted / running)
    return Need(
        held / TARGET_PAGES, f"contexts want {held:.2f} times a replica's pages, and it bears {TARGET_PAGES:.0%}"
    )


def _prompts(load: PoolLoad, measured: MeasuredCapacity, horizon_s: float) -> Need | None:
    """Replicas needed for arriving and waiting prompts."""
    bears = measured.prompt_tokens_s
    if bears is None:
        return None
    asked, cached = load.total("asked_tokens"), load.total("cached_tokens")
    backlog = load.total("queued_tokens") * (1 - cached / asked if asked > 0 else 1.0)
    coming = measured.coming_tokens_s
    return Need(
        coming / (bears * TARGET_USE) + backlog / (bears * horizon_s),
        f"{coming:,.0f} tokens/s of prompts come and {backlog:,.0f} wait, and a replica computes {bears:,.0f}/s",
    )
