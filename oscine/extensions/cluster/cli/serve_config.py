"""The Serve applications of a deployment file, for a config file of Ray Serve, as a RayService of KubeRay has it.

    proxy_location: Disabled
    applications:
      - name: oscine-NAME
        import_path: oscine.extensions.cluster.cli.serve_config:model
        args: {file: FILE, model: NAME}
      - name: oscine
        import_path: oscine.extensions.cluster.cli.serve_config:front
        args: {file: FILE}

There is an application for each model, and one for router and ingress. Serve builds each in a process of its own. So
OSCINE_CLUSTER_KEY must be set, and the prefix seed follows from it if the file has none. `oscine cluster up` needs none
of this.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from oscine.extensions.cluster.cli.deployment_file import read_deployment, with_secrets_of
from oscine.extensions.replicas.spec.deployment import Deployment
from oscine.system.environment import Environment


def model(args: dict[str, str]) -> Any:
    """A ray.serve.Application. `args`: file, and the first name of one of its models. Raises ValueError."""
    from oscine.extensions.cluster.ray.apps import model_app

    deployment = _deployment(args)
    found = deployment.model(args["model"])
    if found is None or found.name != args["model"]:
        raise ValueError(f"{args['file']}: no model's first name is {args['model']!r}")
    return model_app(found, deployment)


def front(args: dict[str, str]) -> Any:
    """The same for router and ingress. `args`: file. Raises ValueError."""
    from oscine.extensions.cluster.ray.apps import cluster_app

    return cluster_app(_deployment(args))


def _deployment(args: dict[str, str]) -> Deployment:
    deployment = with_secrets_of(Environment(), read_deployment(Path(args["file"])))
    key = deployment.key
    if not key:
        raise ValueError("OSCINE_CLUSTER_KEY is not set: the processes of a cluster share a key")
    seed = deployment.prefix_seed or hashlib.blake2b(b"prefix seed", key=key.encode()[:64], digest_size=16).hexdigest()
    return replace(deployment, prefix_seed=seed)
