"""What the router must know of one model of the deployment file. Plain records; JSON carries them as user_config."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Of the requests that wait because every replica of their model has enough to do."""

    max_requests: int = 2048  # one more is refused
    max_wait_s: float = 60.0  # a request that has to wait longer, or would by the estimate, is refused


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """The deployments of one model, and how requests are spread over their replicas."""

    model: str  # of the deployment file
    app: str  # Serve application that its deployments belong to
    generate: str  # deployment that takes requests: aggregated or decode
    prefill: str | None = None  # deployment that only computes prompts for the one above
    prefill_min_tokens: int = 512  # a prompt of which fewer are missing is computed where it is decoded
    prefill_timeout_s: float = 10.0  # from asking to having the pages
    start_timeout_s: float = 120.0  # a request waits so long for the first replica of its model
    queue: QueueLimits = field(default_factory=QueueLimits)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """user_config of the router: msgspec.to_builtins(RouterConfig(...))."""

    models: list[ModelRoute] = field(default_factory=list)
