"""The Kubernetes objects of deploy/: of Kustomize's overlays and of the Helm chart."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.deploy import custom_resources
from tests.deploy.helm_renderer import Chart

DEPLOY = Path(__file__).parents[2] / "deploy"
CHECKERS = DEPLOY.parent / ".venv-checkers" / "bin"  # what `make checkers` brings
KUBERNETES = DEPLOY / "kubernetes"
CHART = Chart(DEPLOY / "helm" / "oscine")
OVERLAYS = (
    "base",
    "overlays/one-gpu",
    "overlays/several-gpus",
    "overlays/autoscaled",
    "overlays/air-gapped",
    "overlays/cluster",
)
VALUES: dict[str, dict[str, Any]] = {
    "chart": {},
    "chart-gpus": {
        "model": "openai/gpt-oss-120b",
        "args": ["--profile=low_latency"],
        "gpus": 2,
        "surge": True,
        "cache": {"size": "200Gi", "accessMode": "ReadWriteMany", "storageClass": "fast"},
        "gateway": {"name": "public", "namespace": "gateways", "listener": "https", "hostnames": ["llm.example.org"]},
        "kserve": {"kind": "ClusterServingRuntime"},
        "monitoring": {"enabled": True, "alerts": True},
        "autoscaling": {"enabled": True, "sequencesPerReplica": 12},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    },
    "chart-offline": {
        "model": "/models/gpt-oss-20b",
        "args": ["--served-model-name=openai/gpt-oss-20b"],
        "gpus": 1,
        "offline": True,
        "imagePullSecrets": [{"name": "oscine-registry"}],
        "models": {"claim": "gpt-oss"},
        "gateway": {"name": "public"},
        "kserve": {"kind": "ServingRuntime"},
    },
}
Objects = list[dict[str, Any]]


def documented_values(file: str) -> dict[str, Any]:
    """Those that docs/kubernetes.md tells users to write into `file`."""
    text = (DEPLOY.parent / "docs" / "kubernetes.md").read_text()
    return dict(yaml.safe_load(text.partition(f"`{file}`:\n")[2].partition("\n    helm ")[0]))


VALUES["chart-documented"] = documented_values("values-offline.yaml")


def kustomize() -> list[str] | None:
    """The command that builds a folder; None where there is none."""
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    return ["kustomize", "build"] if shutil.which("kustomize") else None


@cache
def objects_of(name: str) -> Objects:
    """`name`: an overlay, or one of VALUES."""
    if name in VALUES:
        return CHART.render("oscine", VALUES[name])
    done = subprocess.run([*(kustomize() or ()), str(KUBERNETES / name)], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


def of_kind(objects: Objects, kind: str) -> dict[str, Any]:
    (found,) = (one for one in objects if one["kind"] == kind)
    return found


def pod_templates(objects: Objects) -> Iterator[dict[str, Any]]:
    """Those of a Deployment or of a RayService."""
    for one in objects:
        if one["kind"] == "Deployment":
            yield one["spec"]["template"]
        if one["kind"] == "RayService":
            cluster = one["spec"]["rayClusterConfig"]
            yield from (group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]))


def known_to_kubernetes(objects: Objects) -> Iterator[dict[str, Any]]:
    """Objects whose schema is Kubernetes' own. Of the others, their pods."""
    for one in objects:
        group = one["apiVersion"].rpartition("/")[0]
        if one["kind"] in ("ServingRuntime", "ClusterServingRuntime"):
            spec = {
                key: one["spec"][key] for key in ("containers", "volumes", "imagePullSecrets") if key in one["spec"]
            }
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "runtime"}, "spec": spec}
        elif one["apiVersion"] in custom_resources.SCHEMAS and one["kind"] != "RayService":
            continue
        elif group in ("", "apps", "policy") or group.endswith(".k8s.io"):
            yield one
        elif one["kind"] == "RayService":
            for i, template in enumerate(pod_templates([one])):
                metadata = template["metadata"] | {"name": f"pod-{i}"}
                yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def write_all(folder: Path) -> None:
    """A file per overlay and per set of values, for checkers."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*(OVERLAYS if kustomize() else ()), *VALUES):
        objects = list(known_to_kubernetes(objects_of(name)))
        (folder / f"{Path(name).name}.yaml").write_text(yaml.safe_dump_all(objects, sort_keys=False))


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
