"""The Ray Serve applications of a deployment."""

from ray.serve import Application

from oscine.cluster.ray.apps import cluster_app
from oscine.cluster.spec.deployment import Deployment, ModelSpec, RoleSpec
from oscine.config import ServerOptions


def patience_s(app: Application) -> float:
    """How long Serve lets an actor end by itself."""
    return float(app._bound_deployment._deployment_config.graceful_shutdown_timeout_s)


def test_the_router_may_stay_as_long_as_ingresses_that_drain() -> None:
    """They end together; requests that still wait for a place are to get one."""
    model = ModelSpec(("m",), (RoleSpec("aggregated"),))
    ingress = cluster_app(Deployment((model,), server=ServerOptions(drain_s=33.0)))
    router = ingress._bound_deployment.init_args[-1]
    assert patience_s(router) >= patience_s(ingress) > 33.0
