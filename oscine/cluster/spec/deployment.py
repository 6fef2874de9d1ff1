"""What a cluster shall be: its models with their roles, its ingress, its limits. Plain records that check themselves.

Knows no YAML (oscine.cli.cluster.deployment_file reads it) and no Ray. A bad value raises FileKeyError.
"""

import re
from dataclasses import dataclass, field

from oscine.cluster.spec.model_route import QueueLimits
from oscine.config import EngineOptions, ServerOptions, ToolOptions, check_cluster_key, is_hex
from oscine.option import FileKeyError
from oscine.types import Role

APP = "oscine"  # the Serve app with the deployments "router" and "ingress"
LOCAL = "local"  # a Ray cluster on this machine, that `oscine cluster up` starts


def app_name(model: str) -> str:
    """Of the Serve app of a model, by its first name; its deployments are called as their roles."""
    return f"{APP}-" + re.sub(r"[^A-Za-z0-9._-]", "-", model)


def _require(condition: bool, key: str, rule: str, value: object) -> None:
    if not condition:
        raise FileKeyError(key, f"must be {rule}, not {value!r}")


@dataclass(frozen=True)
class Replicas:
    min: int = 1  # 0: to zero, when nobody asks
    max: int = 1

    def __post_init__(self) -> None:
        _require(self.min >= 0, "min", "at least 0", self.min)
        _require(self.max >= 1, "max", "at least 1", self.max)
        _require(self.min <= self.max, "min", f"at most max ({self.max})", self.min)

    @property
    def scales(self) -> bool:
        return self.min != self.max


@dataclass(frozen=True)
class RoleSpec:
    """Replicas of one kind."""

    role: Role = "aggregated"
    engine: EngineOptions = field(default_factory=EngineOptions)  # `peers` are the replica's own affair
    replicas: Replicas = field(default_factory=Replicas)
    gpus: float = 0.0  # of each replica
    cpus: float = 1.0  # of each replica, and threads of its engine
    tensor_parallel_size: int = 1
    surge: bool = True  # an update starts new replicas before it ends old ones; false where there is no room for both

    def __post_init__(self) -> None:
        _require(self.gpus >= 0, "gpus", "at least 0", self.gpus)
        _require(self.gpus <= 1 or self.gpus == int(self.gpus), "gpus", "whole, or below 1", self.gpus)
        _require(self.cpus > 0, "cpus", "positive", self.cpus)
        rule = "1 (an engine runs on one GPU; tensor parallelism is not available yet)"
        _require(self.tensor_parallel_size == 1, "tensor-parallel-size", rule, self.tensor_parallel_size)


@dataclass(frozen=True)
class PrefillLimits:
    """When a decode replica lets a prefill replica compute a prompt."""

    min_tokens: int = 512  # that its own prefix cache lacks
    timeout_s: float = 10.0  # then it computes the prompt itself

    def __post_init__(self) -> None:
        _require(self.min_tokens >= 1, "min-tokens", "at least 1", self.min_tokens)
        _require(self.timeout_s > 0, "timeout-s", "positive", self.timeout_s)


@dataclass(frozen=True)
class ServiceLevels:
    """What scaling aims at; means over the last seconds."""

    ttft_s: float = 2.0  # to the first token
    itl_s: float = 0.1  # between further ones

    def __post_init__(self) -> None:
        _require(self.ttft_s > 0, "ttft-s", "positive", self.ttft_s)
        _require(self.itl_s > 0, "itl-s", "positive", self.itl_s)


@dataclass(frozen=True)
class ScalingOptions:
    up_cooldown_s: float = 5.0  # between two steps up
    down_cooldown_s: float = 60.0  # that there must have been too many replicas, before one goes
    idle_s: float = 300.0  # without a request, before the last one goes, where min is 0

    def __post_init__(self) -> None:
        _require(self.up_cooldown_s >= 0, "up-cooldown-s", "at least 0", self.up_cooldown_s)
        _require(self.down_cooldown_s >= 0, "down-cooldown-s", "at least 0", self.down_cooldown_s)
        _require(self.idle_s >= 0, "idle-s", "at least 0", self.idle_s)


@dataclass(frozen=True)
class ModelSpec:
    names: tuple[str, ...]  # what requests may call it; the first is its name in the cluster
    roles: tuple[RoleSpec, ...]  # aggregated alone, or prefill and decode
    levels: ServiceLevels = field(default_factory=ServiceLevels)
    prefill: PrefillLimits = field(default_factory=PrefillLimits)
    scaling: ScalingOptions = field(default_factory=ScalingOptions)
    queue: QueueLimits = field(default_factory=QueueLimits)
    migration_retries: int = 4  # of a request whose replicas break; then it fails
    start_timeout_s: float = 600.0  # for a replica to be ready

    def __post_init__(self) -> None:
        _require(bool(self.names) and all(self.names), "name", "a name or several", self.names)
        kinds = sorted(role.role for role in self.roles)
        rule = "aggregated alone, or prefill and decode"
        _require(kinds in (["aggregated"], ["decode", "prefill"]), "roles", rule, " and ".join(kinds) or "none")
        _require(self.migration_retries >= 0, "migration-retries", "at least 0", self.migration_retries)
        _require(self.start_timeout_s > 0, "start-timeout-s", "positive", self.start_timeout_s)
        _require(self.queue.max_requests >= 0, "max-requests", "at least 0", self.queue.max_requests)
        _require(self.queue.max_wait_s > 0, "max-wait-s", "positive", self.queue.max_wait_s)

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
class Deployment:
    models: tuple[ModelSpec, ...]
    ray: str = LOCAL  # or `auto`, or the address of a Ray cluster
    server: ServerOptions = field(default_factory=ServerOptions)  # of each ingress
    tools: ToolOptions = field(default_factory=ToolOptions)
    ingress_replicas: int = 1  # on one machine they share the port
    prefix_seed: str = ""  # hex, of all engines; empty until `oscine cluster up` made one
    key: str = field(default="", repr=False)  # shared by all processes: see oscine.engine.wire.tcp; `up` draws one

    def __post_init__(self) -> None:
        _require(bool(self.models), "models", "one or more", "none")
        _require(bool(self.ray), "ray", "local, auto or an address", self.ray)
        _require(self.ingress_replicas >= 1, "replicas", "at least 1", self.ingress_replicas)
        check_cluster_key(self.key)
        _require(is_hex(self.prefix_seed), "prefix-seed", "hexadecimal digits, two a byte", self.prefix_seed)
        several = self.ingress_replicas == 1 or self.server.port != 0
        _require(several, "port", "given when several ingresses share it", self.server.port)
        for name in self._duplicates():
            raise FileKeyError("name", f"{name!r} belongs to two models")

    def _duplicates(self) -> list[str]:
        names = [name for model in self.models for name in model.names]
        apps = [app_name(model.name) for model in self.models]
        return [name for name in names if names.count(name) > 1] + [app for app in apps if apps.count(app) > 1]

    def model(self, name: str) -> ModelSpec | None:
        return next((model for model in self.models if name in model.names), None)
