"""The old name of oscine.extensions.cluster.ray.autoscaling, which a running Ray application may have."""

from oscine.extensions.cluster.ray.autoscaling import PoolPolicy

__all__ = ["PoolPolicy"]
