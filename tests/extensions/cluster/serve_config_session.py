"""A config of Ray Serve, as a RayService has it, on a Ray of this machine. Prints the answers of the model.

`python -m tests.extensions.cluster.serve_config_session`: a process of its own, as Ray changes the one that uses it.
"""

import json
import os
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import ray
from ray import serve
from ray.serve._private.api import serve_start
from ray.serve._private.client import ServeControllerClient
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from oscine.extensions.cluster.ray import control
from tests.waiting import wait_until

DEADLINE_S = 120.0
FILE = """
ray: auto
ingress: {port: 0, resource: oscine-ingress, host: 127.0.0.1}
models:
  - name: nano
    engine: {kv-cache-bytes: 67108864, max-num-seqs: 16}
    prefill: {cpus: 0.25}
    decode: {cpus: 0.25}
    remote-prefill: {min-tokens: 64}
"""
MODULE = "oscine.extensions.cluster.cli.serve_config"


def applications(file: Path) -> ServeDeploySchema:
    model = {"name": "oscine-nano", "import_path": f"{MODULE}:model", "args": {"file": str(file), "model": "nano"}}
    front = {"name": "oscine", "import_path": f"{MODULE}:front", "args": {"file": str(file)}}
    apps = [app | {"route_prefix": None} for app in (model, front)]
    return ServeDeploySchema(proxy_location="Disabled", applications=apps)  # type: ignore[arg-type]


def run_apps(client: ServeControllerClient, file: Path) -> None:
    """Deploys both applications and waits until they run. The status of an earlier deployment does not count."""
    before = {name: app.last_deployed_time_s for name, app in serve.status().applications.items()}
    client.deploy_apps(applications(file))

    def run() -> bool:
        apps = serve.status().applications
        failed = [app.message for app in apps.values() if app.status == ApplicationStatus.DEPLOY_FAILED]
        assert not failed, failed
        return len(apps) == 2 and all(
            app.status == ApplicationStatus.RUNNING and app.last_deployed_time_s > before.get(name, 0.0)
            for name, app in apps.items()
        )

    wait_until(run, "two applications that run", DEADLINE_S)


def is_ready(port: int | None) -> bool:
    """What a load balancer asks: an ingress listens before it has met the model."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/health/ready", timeout=10) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError:
        return False


def ask(port: int | None) -> str:
    body = {"messages": [{"role": "user", "content": "What is 27 + 58?"}], "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer k"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def replicas() -> list[str]:
    return sorted(actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if "#" in actor["name"])


def main() -> None:
    os.environ |= {"OSCINE_CLUSTER_KEY": "a key of thirty-two characters..", "OSCINE_API_KEY": "k"}
    with tempfile.TemporaryDirectory(prefix="oscine-ray-") as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(FILE)
        ray.init(
            num_cpus=2,
            resources={"oscine-ingress": 1},
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=80 << 20,
            _temp_dir=folder,
        )
        try:
            client = serve_start(proxy_location="Disabled")
            run_apps(client, file)
            port = urlsplit(control.url()).port
            wait_until(lambda: is_ready(port), "readiness", DEADLINE_S)
            answer, before = ask(port), replicas()
            run_apps(client, file)
            print(json.dumps({"answer": answer, "kept": replicas() == before, "again": ask(port)}))
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main()
