"""Strict schemas of the custom resources of deploy/: the fields that it uses, and no others.

They are a part of the schemas that KEDA 2, KubeRay 1, the Prometheus Operator, the Gateway API 1 and KServe publish.
Fields of pods are Kubernetes' own, and kubernetes-validate checks them.
"""

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
DURATION: Schema = {"type": "string", "pattern": r"^[1-9]\d*(ms|s|m|h|d)$"}


def _record(required: str, /, **properties: Schema) -> Schema:
    """An object with these properties alone. `required`: names of some, with spaces between them."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


def _resource(version: str, kind: str, spec: Schema) -> Schema:
    return _record(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=_record("name", name=TEXT, labels=TEXTS, annotations=TEXTS),
        spec=spec,
    )


_RULE = _record("alert expr labels annotations", alert=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS)
_RULE["properties"]["for"] = DURATION
_PROMETHEUS_RULE = _record("groups", groups=_list(_record("name rules", name=TEXT, rules=_list(_RULE))))
_EXPRESSION = _record("key operator values", key=TEXT, operator={"enum": ["In"]}, values=_list(TEXT))
_SERVICE_MONITOR = _record(
    "selector endpoints",
    selector=_record("", matchLabels=TEXTS, matchExpressions=_list(_EXPRESSION)),
    endpoints=_list(_record("port path", port=TEXT, path=TEXT, interval=DURATION)),
)
_POLICY = _record("type value periodSeconds", type={"enum": ["Pods", "Percent"]}, value=COUNT, periodSeconds=COUNT)
_SCALING = _record("", stabilizationWindowSeconds=COUNT, policies=_list(_POLICY))
_BEHAVIOR = _record("", scaleUp=_SCALING, scaleDown=_SCALING)
_TRIGGER = _record(
    "type metadata",
    type={"const": "prometheus"},
    metricType={"enum": ["AverageValue", "Value"]},
    metadata=_record("serverAddress query threshold", serverAddress=TEXT, query=TEXT, threshold=TEXT),
)
_SCALED_OBJECT = _record(
    "scaleTargetRef triggers",
    scaleTargetRef=_record("name", name=TEXT),
    minReplicaCount=COUNT,
    maxReplicaCount=COUNT,
    pollingInterval=COUNT,
    advanced=_record("", horizontalPodAutoscalerConfig=_record("", behavior=_BEHAVIOR)),
    triggers=_list(_TRIGGER),
)
_POD: Schema = _record("metadata spec", metadata=_record("", labels=TEXTS, annotations=TEXTS), spec={"type": "object"})
_HEAD = _record("rayStartParams template", rayStartParams=TEXTS, template=_POD)
_WORKERS = _record(
    "groupName rayStartParams template",
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    template=_POD,
)
_RAY_CLUSTER = _record(
    "headGroupSpec",
    rayVersion=TEXT,
    enableInTreeAutoscaling=FLAG,
    headGroupSpec=_HEAD,
    workerGroupSpecs=_list(_WORKERS),
)
_RAY_SERVICE = _record(
    "rayClusterConfig", excludeHeadPodFromServeSvc=FLAG, serveConfigV2=TEXT, rayClusterConfig=_RAY_CLUSTER
)

# Gateway API: GEP 2257 for durations.
_PARENT = _record("name", name=TEXT, namespace=TEXT, sectionName=TEXT)
_MATCH = _record("path", path=_record("type value", type={"enum": ["PathPrefix", "Exact"]}, value=TEXT))
_BACKEND = _record("name port", name=TEXT, port={"type": "integer", "minimum": 1, "maximum": 65535})
_TIMEOUTS = _record("", request={"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"})
_ROUTE_RULE = _record("backendRefs", matches=_list(_MATCH), timeouts=_TIMEOUTS, backendRefs=_list(_BACKEND))
_ROUTE = _record("parentRefs rules", parentRefs=_list(_PARENT), hostnames=_list(TEXT), rules=_list(_ROUTE_RULE))
_FORMAT = _record("name", name=TEXT, version=TEXT, autoSelect=FLAG)
_RUNTIME = _record(
    "supportedModelFormats containers",
    annotations=TEXTS,
    supportedModelFormats=_list(_FORMAT),
    protocolVersions=_list({"enum": ["v1", "v2"]}),
    imagePullSecrets=_list(_record("name", name=TEXT)),
    nodeSelector=TEXTS,
    tolerations=_list({"type": "object"}),
    containers=_list({"type": "object"}),
    volumes=_list({"type": "object"}),
)

_GATEWAY, _KSERVE = "gateway.networking.k8s.io/v1", "serving.kserve.io/v1alpha1"
_OPERATOR, _KEDA, _RAY = "monitoring.coreos.com/v1", "keda.sh/v1alpha1", "ray.io/v1"
SCHEMAS: dict[str, dict[str, Schema]] = {  # version of the API -> kind -> schema
    _OPERATOR: {
        "PrometheusRule": _resource(_OPERATOR, "PrometheusRule", _PROMETHEUS_RULE),
        "ServiceMonitor": _resource(_OPERATOR, "ServiceMonitor", _SERVICE_MONITOR),
    },
    _KEDA: {"ScaledObject": _resource(_KEDA, "ScaledObject", _SCALED_OBJECT)},
    _GATEWAY: {"HTTPRoute": _resource(_GATEWAY, "HTTPRoute", _ROUTE)},
    _KSERVE: {kind: _resource(_KSERVE, kind, _RUNTIME) for kind in ("ServingRuntime", "ClusterServingRuntime")},
    _RAY: {"RayService": _resource(_RAY, "RayService", _RAY_SERVICE)},
}
