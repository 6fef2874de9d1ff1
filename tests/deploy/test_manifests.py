"""The manifests fit each other, the image and the server: endpoints, options, times, labels, folders.

`make manifests` checks them against the schemas of Kubernetes and with checkov.
"""

import json
import re
import shutil
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from oscine.api import server
from oscine.api.apis import make_service
from oscine.api.routes import endpoints
from oscine.cli.serve.read_options import read_config
from oscine.extensions.cluster.cli import deployment_file, serve_config
from oscine.extensions.cluster.cli.deployment_file import read_deployment
from oscine.extensions.cluster.ray.names import INGRESS, ROUTER
from oscine.extensions.replicas.spec.deployment import APP, app_name
from oscine.settings.config import Config
from tests.cli.test_options import config_of, parser
from tests.deploy import custom_resources
from tests.deploy.manifests import (
    CHART,
    DEPLOY,
    KUBERNETES,
    OVERLAYS,
    VALUES,
    Objects,
    known_to_kubernetes,
    kustomize,
    objects_of,
    of_kind,
    pod_templates,
)
from tests.server import ServerProcess

needs_kustomize = pytest.mark.skipif(kustomize() is None, reason="there is neither kubectl nor kustomize")
ALL = [*(pytest.param(name, marks=needs_kustomize) for name in OVERLAYS), *VALUES]
SERVERS = [name for name in ALL if "cluster" not in str(name)]
CONTAINERFILE = (DEPLOY / "container" / "Containerfile").read_text()
USER = int(re.findall(r"^USER (\d+):", CONTAINERFILE, re.MULTILINE)[-1])
VOLUMES = set(json.loads(re.findall(r"^VOLUME (.*)$", CONTAINERFILE, re.MULTILINE)[-1]))
PORT = int(re.findall(r"^EXPOSE (\d+)$", CONTAINERFILE, re.MULTILINE)[-1])
CLUSTER = KUBERNETES / "overlays" / "cluster" / "cluster.yaml"
KEY = "a key of thirty-two characters.."


def container_of(template: dict[str, Any]) -> dict[str, Any]:
    (found,) = template["spec"]["containers"]
    return dict(found)


def deployed(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod and its container."""
    template = of_kind(objects_of(name), "Deployment")["spec"]["template"]
    return template["spec"], container_of(template)


def served(name: str) -> Config:
    """What the container's arguments say, on a node with eight GPUs."""
    command, *arguments = deployed(name)[1]["args"]
    assert command == "serve"
    return read_config(vars(parser().parse_args(arguments)), num_gpus=8)


@pytest.mark.parametrize("name", SERVERS)
def test_the_server_gets_options_that_it_has_and_the_time_that_it_needs(name: str) -> None:
    pod, container = deployed(name)
    config = served(name)
    assert config.server.host == "0.0.0.0"
    assert config.server.port == PORT == container["ports"][0]["containerPort"]
    before_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    needed_s = before_s + config.server.drain_s + server._CLOSE_S + server._END_S
    assert pod["terminationGracePeriodSeconds"] >= needed_s
    (keys,) = (argument for argument in container["args"] if argument.startswith("--api-keys-file="))
    folders = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert keys == f"--api-keys-file={folders['keys']}/keys.yaml"


@pytest.mark.parametrize("name", ALL)
def test_probes_ask_endpoints_that_need_no_key(name: str, model_folder: Any) -> None:
    service = make_service(config_of(str(model_folder), "--executor", "fake", "--api-key", "k"))
    known = {operation.path for operation in endpoints(service) if operation.open}
    probes = [
        probe["httpGet"]
        for template in pod_templates(objects_of(name))
        for kind, probe in container_of(template).items()
        if kind.endswith("Probe") and "httpGet" in probe
    ]
    assert probes
    assert {probe["path"] for probe in probes} <= known
    assert {probe["port"] for probe in probes} == {"http"}


@pytest.mark.parametrize("name", ALL)
def test_pods_have_no_privileges_and_write_into_volumes_alone(name: str) -> None:
    for template in pod_templates(objects_of(name)):
        pod, container = template["spec"], container_of(template)
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == USER
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts.keys() >= {*VOLUMES, "/tmp", "/dev/shm"}
        assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
        gpus = [container["resources"][kind].get("nvidia.com/gpu") for kind in ("limits", "requests")]
        assert gpus[1] in (None, gpus[0])


@pytest.mark.parametrize("name", ALL)
def test_selectors_find_the_pods_and_names_what_there_is(name: str) -> None:
    objects = objects_of(name)
    labels = [template["metadata"]["labels"].items() for template in pod_templates(objects)]
    service, budget = of_kind(objects, "Service")["spec"], of_kind(objects, "PodDisruptionBudget")["spec"]
    policy = of_kind(objects, "NetworkPolicy")["spec"]
    selected = [set(service["selector"].items()) <= found for found in labels]
    assert selected.count(True) == 1
    for selector in (budget["selector"], policy["podSelector"]):
        assert all(set(selector["matchLabels"].items()) <= found for found in labels)
    ports = [port["name"] for template in pod_templates(objects) for port in container_of(template).get("ports", ())]
    assert {port["targetPort"] for port in service["ports"]} <= set(ports)
    named = {(one["kind"], one["metadata"]["name"]) for one in objects}
    for template in pod_templates(objects):
        assert ("ServiceAccount", template["spec"]["serviceAccountName"]) in named
        for volume in template["spec"]["volumes"]:
            if (claim := volume.get("persistentVolumeClaim")) and not claim.get("readOnly"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in named


@pytest.mark.parametrize("name", [pytest.param("overlays/autoscaled", marks=needs_kustomize), "chart-gpus"])
def test_replicas_are_added_before_those_that_run_are_full(name: str) -> None:
    objects = objects_of(name)
    sequences, pages = (trigger["metadata"] for trigger in of_kind(objects, "ScaledObject")["spec"]["triggers"])
    assert int(sequences["threshold"]) <= 0.8 * served(name).engine.scheduler.max_num_seqs
    assert 0 < float(pages["threshold"]) < 0.95, "below the alert"
    for trigger in (sequences, pages):
        assert f'job="{of_kind(objects, "Service")["metadata"]["name"]}"' in trigger["query"]
    assert "replicas" not in of_kind(objects, "Deployment")["spec"]
    assert of_kind(objects, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("name", SERVERS)
def test_an_update_starts_pods_first_only_where_another_node_can_mount_the_volume(name: str) -> None:
    objects = objects_of(name)
    strategy = of_kind(objects, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    modes = of_kind(objects, "PersistentVolumeClaim")["spec"]["accessModes"]
    assert strategy["maxSurge"] == 0 or modes == ["ReadWriteMany"]
    assert strategy["maxSurge"] + strategy["maxUnavailable"] == 1


@pytest.mark.parametrize("name", ALL)
def test_replicas_are_spread_over_nodes_and_zones(name: str) -> None:
    spread = [t for t in pod_templates(objects_of(name)) if "topologySpreadConstraints" in t["spec"]]
    alone = [t for t in pod_templates(objects_of(name)) if t not in spread]
    assert [container_of(t)["name"] for t in alone] in ([], ["ray-head"])
    for template in spread:
        constraints = template["spec"]["topologySpreadConstraints"]
        assert constraints[0]["topologyKey"] == "kubernetes.io/hostname"
        assert {one["topologyKey"] for one in constraints[1:]} <= {"topology.kubernetes.io/zone"}
        for one in constraints:
            assert one["labelSelector"]["matchLabels"].items() == template["metadata"]["labels"].items()
            assert one["whenUnsatisfiable"] == "ScheduleAnyway", "a pod that waits serves nothing"


@pytest.mark.parametrize("name", ALL)
def test_strangers_reach_the_api_alone_and_pods_reach_names_and_https(name: str) -> None:
    objects = objects_of(name)
    policy = of_kind(objects, "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    ours = {"podSelector": policy["podSelector"]}
    for_all = [rule for rule in policy["ingress"] if "from" not in rule]
    assert for_all == [{"ports": [{"port": "http", "protocol": "TCP"}]}]
    for rule in policy["ingress"]:
        if rule not in for_all and rule["from"] != [ours]:
            (operator,) = rule["from"]
            assert operator["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}
            assert [port["port"] for port in rule["ports"]] == [8265]
    out = [rule for rule in policy["egress"] if rule.get("to") != [ours]]
    assert not any("to" in rule for rule in out)
    names, other = {("UDP", 53), ("TCP", 53)}, {(p["protocol"], p["port"]) for rule in out for p in rule["ports"]}
    if is_offline(name):
        assert other == names
    elif of_kind(objects, "Service")["metadata"]["name"] == "oscine-cluster":
        assert other == names | {("TCP", 443), ("TCP", 6443)}
    else:
        assert other == names | {("TCP", 443)}


def is_offline(name: str) -> bool:
    """Whether its server asks no hub."""
    containers = [container_of(template) for template in pod_templates(objects_of(name))]
    return any({"name": "HF_HUB_OFFLINE", "value": "1"} in container.get("env", ()) for container in containers)


@pytest.mark.parametrize("name", SERVERS)
def test_a_model_in_a_folder_comes_from_a_volume_that_is_only_read(name: str) -> None:
    pod, container = deployed(name)
    model = str(served(name).engine.model.model)
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert is_offline(name) == model.startswith("/models/") == ("/models" in mounts)
    if is_offline(name):
        assert mounts["/models"]["readOnly"]
        (volume,) = (one for one in pod["volumes"] if one["name"] == mounts["/models"]["name"])
        assert "image" in volume or volume["persistentVolumeClaim"]["readOnly"]


@pytest.mark.parametrize("name", ALL)
def test_custom_resources_have_no_fields_that_their_operators_do_not_know(name: str) -> None:
    for one in objects_of(name):
        if one["apiVersion"] in custom_resources.SCHEMAS:
            jsonschema.validate(one, custom_resources.SCHEMAS[one["apiVersion"]][one["kind"]])
        else:
            assert list(known_to_kubernetes([one])), f"no schema of {one['kind']}"


@needs_kustomize
@pytest.mark.parametrize("kind", ["RayService", "ScaledObject", "PrometheusRule", "ServiceMonitor"])
def test_a_misspelt_field_of_a_custom_resource_is_refused(kind: str) -> None:
    objects = objects_of("overlays/cluster" if kind == "RayService" else "overlays/autoscaled")
    one = of_kind(objects, kind)
    schema = custom_resources.SCHEMAS[one["apiVersion"]][kind]
    for wrong in ({**one, "spek": {}}, {**one, "spec": {**one["spec"], "misspelt": 1}}, {**one, "spec": {}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


# ---- the chart ----


def test_the_documents_name_folders_that_there_are() -> None:
    text = (DEPLOY.parent / "docs" / "kubernetes.md").read_text()
    named = re.findall(r"--kustomize (\S+)|helm install \w+ (\S+)", text)
    assert len(named) >= 4
    assert all((DEPLOY.parent / (overlay or chart)).is_dir() for overlay, chart in named)
    for folder in ("base", "overlays", "components"):
        present = {path.parent.name for path in (KUBERNETES / folder).rglob("kustomization.yaml")}
        assert all(re.search(rf"`([a-z]+/)?{name}`", text) for name in present)


@needs_kustomize
@pytest.mark.parametrize("kind", ["Deployment", "NetworkPolicy", "PersistentVolumeClaim", "PodDisruptionBudget"])
def test_the_chart_says_what_the_base_says(kind: str) -> None:
    ours, base = (
        json.loads(json.dumps(of_kind(objects_of(name), kind)["spec"]).replace(label, ""))
        for name, label in (("chart", ', "app.kubernetes.io/instance": "oscine"'), ("base", ""))
    )
    assert ours == base


@pytest.mark.skipif(shutil.which("helm") is None, reason="there is no helm")
@pytest.mark.parametrize("name", VALUES)
def test_helm_renders_the_chart_as_we_do(name: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(VALUES[name]))
    command = ["helm", "template", "oscine", str(CHART.folder), "--values", str(values)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    def by_kind(objects: Objects) -> dict[str, Any]:
        return {one["kind"]: one for one in objects}

    assert by_kind(list(yaml.safe_load_all(done.stdout))) == by_kind(objects_of(name))


def test_values_of_the_chart_are_checked() -> None:
    schema = json.loads((CHART.folder / "values.schema.json").read_text())
    assert schema["properties"].keys() - {"global"} == CHART.values.keys()
    jsonschema.validate(CHART.values, schema)
    for wrong in (
        {"modle": "x"},
        {"gpus": "2"},
        {"service": {"port": 0}},
        {"surge": True},
        {"cache": {"size": "1Gi"}},
        {"models": {"claim": "a", "image": "b"}},
        {"offline": "yes"},
        {"autoscaling": {"kvUsage": "80"}},
        {"gateway": {"name": "a", "hostnames": ["https://a.example"]}},
        {"gateway": {"name": "a", "timeout": "10"}},
        {"kserve": {"kind": "InferenceService"}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(CHART.values | wrong, schema)


def test_a_route_leads_to_the_service() -> None:
    objects = objects_of("chart-gpus")
    route, service = of_kind(objects, "HTTPRoute"), of_kind(objects, "Service")
    [rule] = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}]
    assert rule["timeouts"] == {"request": "0s"}, "an answer may take long"


def test_kserve_starts_the_server_as_the_deployment_does() -> None:
    """But with the model that KServe has put into /mnt/models, under the name of the InferenceService."""
    objects = objects_of("chart-gpus")
    runtime = of_kind(objects, "ClusterServingRuntime")["spec"]
    container, ours = container_of({"spec": runtime}), deployed("chart-gpus")[1]
    assert container["args"] == ["serve", "/mnt/models", "--served-model-name={{.Name}}", *ours["args"][2:]]
    known = read_config(vars(parser().parse_args(container["args"][1:])), num_gpus=2)
    assert container["ports"][0]["containerPort"] == known.server.port
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        expected = ours[probe] | {"httpGet": ours[probe]["httpGet"] | {"port": PORT}}
        assert container[probe] == expected
    folders = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert folders.keys() == {mount["mountPath"] for mount in ours["volumeMounts"]}
    assert set(folders.values()) == {volume["name"] for volume in runtime["volumes"]}
    pod = of_kind(objects, "Deployment")["spec"]["template"]["spec"]
    assert container["securityContext"].items() >= ours["securityContext"].items()
    assert container["securityContext"]["seccompProfile"] == pod["securityContext"]["seccompProfile"]
    for where in ("nodeSelector", "tolerations"):
        assert runtime.get(where) == pod.get(where)
    assert container["securityContext"]["runAsUser"] == USER
    assert container["resources"] == ours["resources"]


@pytest.mark.parametrize("kind", ["HTTPRoute", "ServingRuntime"])
def test_routes_and_runtimes_are_off_by_default(kind: str) -> None:
    assert kind not in {one["kind"] for one in objects_of("chart")}
    one = of_kind(objects_of("chart-offline"), kind)
    schema = custom_resources.SCHEMAS[one["apiVersion"]][kind]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**one, "spec": {**one["spec"], "misspelt": 1}}, schema)


def test_a_server_without_a_hub_answers_under_the_models_published_name(model_folder: Path, tmp_path: Path) -> None:
    """It has the documented chart's arguments and environment, but a small model, a local address and no GPU."""
    container = deployed("chart-documented")[1]
    command, *arguments = container["args"]
    assert command == "serve"
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps([{"name": "a", "key": "sk-offline"}]))
    changed = {
        "/models/gpt-oss-20b": str(model_folder),
        "--api-keys-file=/etc/oscine/keys.yaml": f"--api-keys-file={keys}",
    }
    options = [
        changed.get(argument, argument) for argument in arguments if not argument.startswith(("--gpus", "--host"))
    ]
    environment = {one["name"]: one["value"] for one in container["env"]}
    with ServerProcess(*options, "--executor", "fake", "--log-level", "error", environment=environment) as server:
        answer = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "openai/gpt-oss-20b", "prompt": "a", "max_tokens": 2},
            headers={"Authorization": "Bearer sk-offline"},
        )
    assert answer.status_code == 200
    assert answer.json()["model"] == "openai/gpt-oss-20b"


def test_the_notes_name_the_service() -> None:
    assert "http://a.default.svc:80/v1" in CHART.notes("a")


# ---- the cluster ----


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, model_folder: Any) -> None:
    monkeypatch.setattr(deployment_file, "tokenizer_folder", lambda engine: model_folder)  # not from the hub
    monkeypatch.setenv("OSCINE_CLUSTER_KEY", KEY)
    monkeypatch.setenv("OSCINE_API_KEY", "k")


@needs_kustomize
@pytest.mark.usefixtures("cluster")
def test_serve_gets_the_applications_of_the_deployment_file() -> None:
    service = of_kind(objects_of("overlays/cluster"), "RayService")
    config = ServeDeploySchema(**yaml.safe_load(service["spec"]["serveConfigV2"]))
    deployment = read_deployment(CLUSTER)
    assert {app.name for app in config.applications} == {APP, *(app_name(model.name) for model in deployment.models)}
    mounts = [mount["mountPath"] for t in pod_templates([service]) for mount in container_of(t)["volumeMounts"]]
    for app in config.applications:
        module, _, function = app.import_path.partition(":")
        assert module == serve_config.__name__
        assert app.args["file"] == f"/etc/oscine/{CLUSTER.name}"
        assert "/etc/oscine" in mounts
        built = getattr(serve_config, function)(app.args | {"file": str(CLUSTER)})
        assert built._bound_deployment.name in (INGRESS, "decode")


@needs_kustomize
@pytest.mark.usefixtures("cluster")
def test_workers_have_what_the_replicas_ask_for() -> None:
    deployment = read_deployment(CLUSTER)
    spec = of_kind(objects_of("overlays/cluster"), "RayService")["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    front = groups["ingress"]
    assert json.loads(json.loads(front["rayStartParams"]["resources"])) == {deployment.ingress_resource: 1}
    assert front["replicas"] == deployment.ingress_replicas
    (model,) = deployment.models
    assert groups["gpu"]["minReplicas"] == sum(role.replicas.min for role in model.roles)
    assert groups["gpu"]["maxReplicas"] == sum(role.replicas.max for role in model.roles)
    resources = container_of(groups["gpu"]["template"])["resources"]["limits"]
    for role in model.roles:
        assert (role.gpus, role.cpus) == (int(resources["nvidia.com/gpu"]), int(resources["cpu"]))
    grace_s = front["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= deployment.server.drain_s + server._CLOSE_S + server._END_S


@pytest.mark.usefixtures("cluster")
def test_the_applications_share_a_seed_and_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    model = serve_config.model({"file": str(CLUSTER), "model": "gpt-oss-120b"})
    front = serve_config.front({"file": str(CLUSTER)})
    options, _ = model._bound_deployment.init_args
    given, _, key, router = front._bound_deployment.init_args
    assert (options.key, key, given.api_keys) == (KEY, KEY, ("k",))
    assert router._bound_deployment.name == ROUTER
    assert options.prefix_seed == front._bound_deployment._deployment_config.user_config["prefix_seed"] != ""
    assert front._bound_deployment.ray_actor_options["resources"] == {"oscine-ingress": 1}
    with pytest.raises(ValueError, match="no model's first name is 'other'"):
        serve_config.model({"file": str(CLUSTER), "model": "other"})
    monkeypatch.delenv("OSCINE_CLUSTER_KEY")
    with pytest.raises(ValueError, match="OSCINE_CLUSTER_KEY is not set"):
        serve_config.front({"file": str(CLUSTER)})


# ---- compose ----


COMPOSE = DEPLOY / "compose"


def compose_services(file: str = "compose.yaml") -> dict[str, Any]:
    return dict(yaml.safe_load((COMPOSE / file).read_text())["services"])


def without_variables(text: str) -> str:
    """As compose reads it where no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_compose_runs_the_server_as_the_image_is_made() -> None:
    services = compose_services()
    oscine = services["oscine"]
    command, *arguments = map(without_variables, oscine["command"])
    assert command == "serve"
    config = config_of(*arguments)
    assert f"{oscine['ports'][0]}".endswith(f":{config.server.port}")
    assert config.server.port == PORT
    assert int(oscine["stop_grace_period"].removesuffix("s")) >= config.server.drain_s + server._CLOSE_S + server._END_S
    assert {volume.split(":")[1] for volume in oscine["volumes"]} == VOLUMES
    assert (COMPOSE / oscine["build"]["context"] / oscine["build"]["dockerfile"]).exists()
    for name, service in services.items():
        for source, *_ in (volume.split(":") for volume in service["volumes"]):
            assert not source.startswith(".") or (COMPOSE / source).exists(), f"{name}: {source}"
    (scraped,) = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["scrape_configs"]
    assert scraped["static_configs"][0]["targets"] == [f"oscine:{PORT}"]


def test_compose_builds_stages_of_the_image_and_tags_them_so() -> None:
    stages = re.findall(r"^FROM \S+ AS (\w+)$", CONTAINERFILE, re.MULTILINE)
    services, beside = compose_services(), compose_services("compose.gpu.yaml")
    assert beside.keys() <= services.keys(), "a file that is laid over the other"
    for target, service in (("cpu", services["oscine"]), ("cuda", beside["oscine"])):
        assert service["build"]["target"] == target
        assert target in stages
        assert without_variables(service["image"]).rpartition(":")[2] == target
    assert stages[-1] == "cpu", "the default of a build"


def test_the_image_is_made_of_what_the_repository_has() -> None:
    root = DEPLOY.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    for sources in re.findall(r"^COPY (?!--)(.+) \S+$", CONTAINERFILE, re.MULTILINE):
        assert all((root / source).exists() for source in sources.split())
    for extras in re.findall(r"^ARG EXTRAS=(.+)$", CONTAINERFILE, re.MULTILINE):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    for module in re.findall(r" -m (oscine\S+)", CONTAINERFILE):
        assert find_spec(module) is not None
    (program,) = json.loads(re.findall(r"^ENTRYPOINT (.+)$", CONTAINERFILE, re.MULTILINE)[0])
    assert program in project["scripts"]


def test_what_looks_at_the_server_needs_no_key(model_folder: Any) -> None:
    """The image's health check, by a program that it has, and Prometheus."""
    service = make_service(config_of(str(model_folder), "--executor", "fake", "--api-key", "k"))
    known = {operation.path for operation in endpoints(service) if operation.open}
    check = json.loads(re.findall(r"^HEALTHCHECK .*\n    CMD (.*)$", CONTAINERFILE, re.MULTILINE)[0])
    assert check[0] in re.findall(r"apt-get install .*", CONTAINERFILE)[0].split()
    host, path = re.findall(r"http://([^/]*)(/[^']*)", check[-1])[0]
    (scraped,) = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["scrape_configs"]
    assert host == f"127.0.0.1:{PORT}"
    assert {path, scraped["metrics_path"]} <= known


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    services = compose_services()
    grafana = services["grafana"]
    mounts = {target: source for source, target, *_ in (volume.split(":") for volume in grafana["volumes"])}
    (provider,) = yaml.safe_load((COMPOSE / "grafana" / "dashboards.yaml").read_text())["providers"]
    folder, _, home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"].rpartition("/")
    assert provider["options"]["path"] == folder
    dashboard = json.loads((COMPOSE / mounts[folder] / home).read_text())
    (source,) = yaml.safe_load((COMPOSE / "grafana" / "datasources.yaml").read_text())["datasources"]
    assert source["url"].removeprefix("http://").partition(":")[0] in services
    (variable,) = (one for one in dashboard["templating"]["list"] if one["type"] == "datasource")
    assert variable["query"] == source["type"]
    declared = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["volumes"].keys()
    named = {volume.split(":")[0] for service in services.values() for volume in service["volumes"]}
    assert {name for name in named if not name.startswith(".")} == declared
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in published)
