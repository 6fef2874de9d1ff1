"""Writes the deployment file that `read_deployment` reads: only what differs from the defaults."""

from typing import Any

import yaml

from oscine.extensions.replicas.spec.deployment import Deployment, ModelSpec, Replicas, RoleSpec
from oscine.settings.config import EngineOptions, ModelOptions, SpeculationOptions
from oscine.settings.option import Option, Options, options_of

Values = dict[str, Any]
# Written elsewhere in the file, or in another form.
_ELSEWHERE = ("model", "tensor-parallel-size", "kv-events-config", "speculative-config", "served-model-name")
_DRAFTS = {"lookup_min": "prompt_lookup_min", "lookup_max": "prompt_lookup_max"}


def deployment_text(deployment: Deployment) -> str:
    """YAML. Secrets (the key, API keys) are written if they are given."""
    ingress: Values = {"replicas": deployment.ingress_replicas} if deployment.ingress_replicas != 1 else {}
    ingress |= {"resource": deployment.ingress_resource} if deployment.ingress_resource else {}
    ingress |= _given(deployment.server) | _given(deployment.tools)
    content = _given(deployment)
    content |= {"prefix-seed": deployment.prefix_seed} if deployment.prefix_seed else {}
    content |= {"ingress": ingress} if ingress else {}
    content |= {"router": {"resource": deployment.router_resource}} if deployment.router_resource else {}
    content["models"] = [_model(model) for model in deployment.models]
    return yaml.safe_dump(content, sort_keys=False, width=100)


def _model(model: ModelSpec) -> Values:
    content: Values = {"name": model.name if len(model.names) == 1 else [*model.names]}
    named = model.serving.engine.model.model
    content |= {"model": named} if named != ModelOptions().model else {}
    content |= {role.role: _role(role) for role in model.roles}
    sections = {
        "service-levels": model.levels,
        "remote-prefill": model.prefill,
        "scaling": model.scaling,
        "queue": model.queue,
    }
    return content | {key: values for key, one in sections.items() if (values := _given(one))} | _given(model)


def _role(role: RoleSpec) -> Values:
    content = _given(role)
    if role.replicas.scales:
        content["replicas"] = {"min": role.replicas.min, "max": role.replicas.max}
    elif role.replicas != Replicas():
        content["replicas"] = role.replicas.min
    ranks = role.engine.model.tensor_parallel_size
    if ranks != 1 or role.gpus > 1:  # a role of several GPUs has a rank on each, unless it says otherwise
        content["tensor-parallel-size"] = ranks
    engine = _engine(role.engine)
    return content | ({"engine": engine} if engine else {})


def _engine(options: EngineOptions) -> Values:
    content: Values = {}
    for section in (options.model, options.cache, options.scheduler, options):
        content |= _given(section)
    scheduler = options.scheduler
    for field in ("max_num_seqs", "max_num_batched_tokens"):  # given, whatever the value, or left to memory
        content.pop(field.replace("_", "-"), None)
        if field not in scheduler.by_memory:
            content[field.replace("_", "-")] = getattr(scheduler, field)
    if options.speculation != SpeculationOptions("none"):
        drafts = {one.field: getattr(options.speculation, one.field) for one in options_of(SpeculationOptions)}
        given = {_DRAFTS.get(name, name): value for name, value in drafts.items() if value is not None}
        content["speculative-config"] = given
    return content


def _given(section: Options) -> Values:
    """The options of a section whose values are not the defaults, by the names that a file has for them."""
    found = {one.name: _written(one, getattr(section, one.field)) for one in options_of(type(section))}
    defaults = {one.name: _written(one, one.default) for one in options_of(type(section))}
    return {name: value for name, value in found.items() if name not in _ELSEWHERE and value != defaults[name]}


def _written(option: Option, value: Any) -> Any:
    if option.is_flag and option.default and option.name.replace("-", "_") != option.field:
        return not value  # its name undoes what the field says
    return [*value] if isinstance(value, tuple) else value
