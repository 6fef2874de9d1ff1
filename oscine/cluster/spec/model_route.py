"""What the router must know of one model of the deployment file. Plain records; JSON carries them as user_config."""

from dataclasses import dataclass, field

from oscine.option import Options, option
from oscine.types import Role


@dataclass(frozen=True)
class QueueLimits(Options, group="queue"):
    """Of the requests that wait because every replica of their model has enough to do."""

    max_requests: int = option(2048, "most requests that wait; further ones are refused", at_least=0)
    max_wait_s: float = option(
        60.0,
        "most seconds of waiting; a request that has to wait longer, or would by the estimate, is refused",
        above=0,
    )


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """The roles of one model, and how requests are spread over their replicas."""

    model: str  # of the deployment file
    generate: Role = "aggregated"  # of the replicas that take requests: aggregated or decode
    prefill: bool = False  # whether there are replicas that only compute prompts for them
    prefill_min_tokens: int = 512  # a prompt of which fewer are missing is computed where it is decoded
    prefill_timeout_s: float = 10.0  # from asking to having the pages
    start_timeout_s: float = 120.0  # a request waits so long for the first replica of its model
    queue: QueueLimits = field(default_factory=QueueLimits)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """user_config of the router: msgspec.to_builtins(RouterConfig(...))."""

    models: list[ModelRoute] = field(default_factory=list)
