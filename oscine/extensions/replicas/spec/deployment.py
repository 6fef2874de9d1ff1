"""The configuration of a cluster: models with their roles, the ingress, and limits.

The records check their values: a bad one raises FileKeyError. oscine.extensions.cluster.cli.deployment_file reads the
YAML, and checks how keys fit together.
"""

import re
from dataclasses import dataclass, field

from oscine.settings.config import Config, EngineOptions, ServerOptions, ToolOptions
from oscine.settings.devices import engines_of
from oscine.settings.option import FileKeyError, Options, as_written, option
from oscine.settings.validators import is_hex
from oscine.system.environment import check_cluster_key
from oscine.types import Role

APP = "oscine"
LOCAL = "local"  # a Ray cluster on this machine, that `oscine cluster up` starts


def front_name(wire_version: str = "") -> str:
    """The Serve app with the deployments "router" and "ingress". `wire_version`: see Deployment."""
    return f"{APP}{_suffix(wire_version)}"


def app_name(model: str, wire_version: str = "") -> str:
    """The Serve app of a model, by its first name; its deployments have the names of its roles."""
    return f"{APP}-" + re.sub(r"[^A-Za-z0-9._-]", "-", model) + _suffix(wire_version)


def _suffix(wire_version: str) -> str:
    return f".{wire_version[:8]}" if wire_version else ""


def _require(condition: bool, key: str, rule: str, value: object) -> None:
    if not condition:
        raise FileKeyError(key, f"must be {rule}, not {as_written(value)}")


@dataclass(frozen=True)
class Replicas(Options, group="replicas"):
    min: int = option(1, "fewest replicas; with 0 there is none while there are no requests", at_least=0)
    max: int = option(1, "most replicas", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.min <= self.max, "min", f"at most max ({self.max})", self.min)

    @property
    def scales(self) -> bool:
        return self.min != self.max


def _read_labels(text: str) -> dict[str, str] | None:
    """Values by key; None if `text` has another form."""
    pairs = [pair.strip().partition("=") for pair in text.split(",")]
    return {key: value for key, _, value in pairs} if all(key and value for key, _, value in pairs) else None


@dataclass(frozen=True)
class RolePart:
    """Replicas of a role on nodes with the same labels: a deployment of Ray Serve."""

    name: str  # unique in its model
    labels: dict[str, str]  # that a node must have
    replicas: Replicas


@dataclass(frozen=True)
class RoleSpec(Options, group="role"):
    """Replicas of one kind."""

    role: Role = "aggregated"
    engine: EngineOptions = field(default_factory=EngineOptions)  # a replica makes its own `peers`
    replicas: Replicas = field(default_factory=Replicas)
    gpus: float = option(0.0, "GPUs per replica", at_least=0)
    data_parallel_size: int = option(1, "engines per replica, each with tensor-parallel-size GPUs", at_least=1)
    enable_expert_parallel: bool = option(False, "whether the engines of a replica share the experts")
    cpus: float = option(1.0, "CPUs per replica, and threads of its engines", above=0)
    surge: bool = option(
        True, "whether an update starts new replicas before it ends old ones; false where there is no room for both"
    )

    resource: str = option("", "custom resource of Ray; replicas run only on nodes that have it, and each takes 1")
    labels: tuple[str, ...] = option(
        (),
        "labels of Ray's nodes, KEY=VALUE[,KEY=VALUE]; replicas run only on nodes that have them, and with several "
        "entries they are divided among these",
        "KEY=VALUE,...",
        rule=("labels such as rack=a or rack=a,disk=ssd", lambda text: _read_labels(text) is not None),
    )
    max_replicas_per_node: int = option(0, "most replicas on one node; 0 for any number", at_least=0, at_most=100)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.resource not in ("CPU", "GPU"), "resource", "the name of a custom resource", self.resource)
        _require(self.gpus <= 1 or self.gpus == int(self.gpus), "gpus", "whole, or below 1", self.gpus)
        size, engines = self.engine.model.tensor_parallel_size, self.data_parallel_size
        if engines == 1:
            fits = self.gpus == 0 or size in (1, self.gpus)
            _require(fits, "gpus", f"the tensor-parallel-size ({size}), or 0 for ranks on a CPU", self.gpus)
        else:
            rule = f"tensor-parallel-size times data-parallel-size ({size} x {engines}), or 0 for engines on a CPU"
            _require(self.gpus in (0, size * engines), "gpus", rule, self.gpus)
            _require(self.role == "aggregated", "data-parallel-size", f"1 for the role {self.role}", engines)
        fits = len(self.labels) < 2 or not self.replicas.scales
        _require(fits, "labels", "one entry where the number of replicas is not fixed", len(self.labels))
        fits = not self.enable_expert_parallel or (engines > 1 and size == 1)
        rule = "false without data-parallel-size above 1, or with tensor-parallel-size above 1"
        _require(fits, "enable-expert-parallel", rule, self.enable_expert_parallel)

    @property
    def parts(self) -> list["RolePart"]:
        """One for each entry of `labels`. Their numbers of replicas differ by one at most, and the first have more."""
        if len(self.labels) < 2:
            of = _read_labels(self.labels[0]) if self.labels else {}
            return [RolePart(self.role, of or {}, self.replicas)]
        each, more = divmod(self.replicas.min, len(self.labels))
        counts = [each + (i < more) for i in range(len(self.labels))]
        return [
            RolePart(
                self.role if i == 0 else f"{self.role}-{i + 1}", _read_labels(labels) or {}, Replicas(count, count)
            )
            for i, (labels, count) in enumerate(zip(self.labels, counts, strict=True))
            if count
        ]

    @property
    def engines(self) -> list[EngineOptions]:
        """The options of each engine of a replica. Raises ValueError if these do not fit its GPUs."""
        if self.data_parallel_size == 1:
            return [self.engine]
        server = ServerOptions(
            data_parallel_size=self.data_parallel_size, enable_expert_parallel=self.enable_expert_parallel
        )
        return engines_of(Config(self.engine, server), int(self.gpus))


@dataclass(frozen=True)
class PrefillLimits(Options, group="remote-prefill"):
    """When a prefill replica computes a prompt for a decode replica."""

    min_tokens: int = option(512, "fewest tokens of it that the decode replica's prefix cache lacks", at_least=1)
    timeout_s: float = option(10.0, "seconds after which the decode replica computes it itself", above=0)


@dataclass(frozen=True)
class QueueLimits(Options, group="queue"):
    """For requests that wait while all replicas of their model are busy."""

    max_requests: int = option(2048, "most requests that wait; further ones are refused", at_least=0)
    max_wait_s: float = option(
        60.0,
        "most seconds of waiting; a request that has to wait longer, or would by the estimate, is refused",
        above=0,
    )


@dataclass(frozen=True)
class ServiceLevels(Options, group="service-levels"):
    """Targets of scaling, as means over the last seconds."""

    ttft_s: float = option(2.0, "seconds to the first token", above=0)
    itl_s: float = option(0.1, "seconds between further tokens", above=0)


@dataclass(frozen=True)
class ScalingOptions(Options, group="scaling"):
    up_cooldown_s: float = option(5.0, "seconds between two steps up", at_least=0)
    down_cooldown_s: float = option(60.0, "seconds with too many replicas before one goes", at_least=0)
    idle_s: float = option(300.0, "seconds without a request before the last replica goes, if min is 0", at_least=0)


@dataclass(frozen=True)
class ModelSpec(Options, group="model"):
    names: tuple[str, ...]  # what requests may call it; the first is its name in the cluster
    roles: tuple[RoleSpec, ...]  # aggregated alone, or prefill and decode
    levels: ServiceLevels = field(default_factory=ServiceLevels)
    prefill: PrefillLimits = field(default_factory=PrefillLimits)
    scaling: ScalingOptions = field(default_factory=ScalingOptions)
    queue: QueueLimits = field(default_factory=QueueLimits)
    migration_retries: int = option(4, "replicas that a request may lose before it fails", at_least=0)
    start_timeout_s: float = option(600.0, "seconds in which a replica must be ready", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(bool(self.names) and all(self.names), "name", "a name or several", self.names)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def serving(self) -> RoleSpec:
        """The role whose replicas answer requests."""
        return next(role for role in self.roles if role.role != "prefill")

    def role(self, role: Role) -> RoleSpec | None:
        return next((spec for spec in self.roles if spec.role == role), None)


@dataclass(frozen=True)
class Deployment(Options, group="cluster"):
    models: tuple[ModelSpec, ...]
    ray: str = option(LOCAL, "address of a Ray cluster, auto, or local", rule=("local, auto or an address", bool))
    server: ServerOptions = field(default_factory=ServerOptions)  # of each ingress
    tools: ToolOptions = field(default_factory=ToolOptions)
    ingress_replicas: int = 1  # on one machine they share the port
    ingress_resource: str = ""  # custom resource of Ray, of which each ingress takes 1; empty: they run on any node
    router_resource: str = ""  # the same of the router
    prefix_seed: str = ""  # hex, of all engines; empty until `oscine cluster up` made one
    # Version of the messages between its processes. Names of Serve apps end with it, so that two releases that cannot
    # talk run side by side. `oscine cluster up` sets it; without it the names have no such end.
    wire_version: str = ""
    key: str = field(default="", repr=False)  # shared by all processes: see oscine.engine.wire.tcp; `up` draws one

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(bool(self.models), "models", "one or more", "none")
        _require(self.ingress_replicas >= 1, "replicas", "at least 1", self.ingress_replicas)
        check_cluster_key(self.key)
        _require(is_hex(self.prefix_seed), "prefix-seed", "hexadecimal digits, two a byte", self.prefix_seed)

    def model(self, name: str) -> ModelSpec | None:
        return next((model for model in self.models if name in model.names), None)
