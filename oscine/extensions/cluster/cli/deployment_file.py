"""Reads the deployment file of a cluster: YAML, each error with its line, its key and the rule.

Rules on values live in oscine.extensions.replicas.spec.deployment and oscine.settings.config. Options of an engine and
of the ingress are those of `oscine serve`, read by the same code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from oscine.api.common.keys import ApiKeys
from oscine.chat.vocabulary import tokenizer_folder
from oscine.checkpoint.hub import check_local
from oscine.cli.serve import read_options as options
from oscine.cli.serve.options import ALIASES, OPPOSITES, PROFILE
from oscine.extensions.cluster.cli.yaml_section import Section
from oscine.extensions.replicas.spec.deployment import (
    Deployment,
    ModelSpec,
    PrefillLimits,
    QueueLimits,
    Replicas,
    RoleSpec,
    ScalingOptions,
    ServiceLevels,
    app_name,
)
from oscine.settings.adapters import named_adapter
from oscine.settings.config import OPTIONS, EngineOptions, ServerOptions, SpeculationOptions, ToolOptions
from oscine.settings.models import ModelsOptions
from oscine.settings.name import NOTES, Values, merge
from oscine.settings.option import OptionError, options_of
from oscine.settings.tools import FileSearchOptions
from oscine.system.environment import Environment
from oscine.types import Role

_ROLES: tuple[Role, ...] = ("aggregated", "prefill", "decode")
_INGRESS_SECTIONS = (ServerOptions, ToolOptions, FileSearchOptions)
_OF_INGRESS = {option.name for section in _INGRESS_SECTIONS for option in options_of(section)}
_ON_DEMAND = {option.name for option in options_of(ModelsOptions)}  # of a server without a cluster
_ENGINE = OPTIONS.keys() - _OF_INGRESS - _ON_DEMAND - {"model", "kv-events-config"}
_RANKS = OPTIONS["tensor-parallel-size"]  # an option of the engine that may also stand beside `gpus`
_INGRESS = _OF_INGRESS - {"served-model-name", "data-parallel-size", "enable-expert-parallel", "gpus", "expected-load"}


def read_deployment(file: Path, *, finds_models: bool = True) -> Deployment:
    """Raises CommandError: FILE:LINE, the key, the rule. Nothing is started.

    `finds_models`: whether models must be there; names of a hub may then be looked up.
    """
    top = Section.read(file)
    if "models" not in top:
        raise top.error("models", "models is missing: a list of what shall be served")
    models: list[ModelSpec] = []
    for section in top.sections("models"):
        models.append(_model(section, finds_models))
        _check_names(section, models)
    ingress = top.section("ingress")
    replicas = ingress.take("replicas", int) if "replicas" in ingress else 1
    resource = ingress.take("resource", str) if "resource" in ingress else ""
    server, tools = _ingress(ingress)
    if replicas > 1 and server.port == 0:
        raise ingress.error("port", "port must be given where several ingresses share it")
    router = _router_resource(top.section("router"))
    seed = {"prefix_seed": top.take("prefix-seed", str)} if "prefix-seed" in top else {}  # no number: zeros count
    of_ingress = {"server": server, "tools": tools, "ingress_replicas": replicas, "ingress_resource": resource}
    return top.record(Deployment, models=tuple(models), router_resource=router, **of_ingress, **seed)


def with_secrets_of(environment: Environment, deployment: Deployment) -> Deployment:
    """Adds the cluster's key, the API key and the administrator's key of the environment."""
    server = deployment.server
    given, admin = (filter(None, [key]) for key in (environment.server_api_key, environment.server_admin_key))
    server = replace(server, api_keys=(*server.api_keys, *given), admin_keys=(*server.admin_keys, *admin))
    return replace(deployment, server=server, key=environment.cluster_key)


def _router_resource(section: Section) -> str:
    if "replicas" in section and (replicas := section.take("replicas", int)) != 1:
        rule = "1 (the router has the whole queue; it is started again when it dies)"
        raise section.error("replicas", f"replicas must be {rule}, not {replicas}")
    resource: str = section.take("resource", str) if "resource" in section else ""
    section.end()
    return resource


# ---- options of `oscine serve` ----


def _read_options(section: Section, known: set[str], elsewhere: str) -> Values:
    """The remaining keys of a section, as options. The section keeps their line numbers for errors."""
    values: Values = {}
    for key, value in section.rest():
        try:
            read = options.read_mapping({key: value})
        except ValueError as error:
            raise section.error(key, str(error)) from None
        read.pop(NOTES, None)
        if read.keys() - known:
            raise section.error(key, f"{key} {elsewhere}")
        merge(values, read)
    with _lines_of(section):
        options.check_exclusions(values)
    return values


def _ingress(section: Section) -> tuple[ServerOptions, ToolOptions]:
    values = _read_options(section, _INGRESS, "is no option of an ingress: it belongs to a model")
    with _lines_of(section):
        if "port-file" in values:
            raise OptionError("port-file", "is for `oscine serve`: `oscine cluster status` shows where an ingress is")
        config = options.make_config([_absolute(values)])
        ApiKeys(config.server)
    return config.server, config.tools


def _engine_options(section: Section) -> tuple[Section, Values]:
    engine = section.section("engine")
    return engine, _read_options(engine, _ENGINE, "is no option of an engine")


def _engine(model: str | None, profile: Values, *sections: tuple[Section, Values]) -> EngineOptions:
    """The first section wins."""
    named = {} if model is None else {"model": model}
    with _lines_of(*(section for section, _ in sections)):
        return options.make_config([*(_absolute(values) for _, values in sections), profile, named]).engine


@contextmanager
def _lines_of(*sections: Section) -> Iterator[None]:
    """Gives an OptionError the line of the option, or of another that the rule is about, if a section has it."""
    try:
        yield
    except OptionError as error:
        for name in (error.option, *error.related):
            for section in sections:
                for key in section.keys:
                    if name in (key, ALIASES.get(key), OPPOSITES.get(key)):
                        raise section.error(key, str(error)) from None
        raise sections[-1].error("", str(error)) from None


def _absolute(values: Values) -> Values:
    """Files as the actors of a cluster find them from any folder."""

    def is_file(name: str, value: str) -> bool:
        kind = OPTIONS[name].metavar
        # Else it may be the name of a published shape, or of a model on the hub.
        always = kind in ("FILE", "DIR") and value != ":memory:"
        return always or (("FILE" in kind or kind == "FOLDER") and Path(value).exists())

    files = {name for name, value in values.items() if isinstance(value, str) and is_file(name, value)}
    heads = {name: _absolute_head(value) for name, value in values.items() if isinstance(value, SpeculationOptions)}
    adapters: Values = {}
    if "lora-modules" in values:
        named = filter(None, map(named_adapter, values["lora-modules"]))
        adapters = {"lora-modules": tuple(f"{name}={Path(path).resolve()}" for name, path in named)}
    return values | heads | adapters | {name: str(Path(values[name]).resolve()) for name in files}


def _absolute_head(drafts: SpeculationOptions) -> SpeculationOptions:
    if drafts.model is None or not Path(drafts.model).exists():
        return drafts
    return replace(drafts, model=str(Path(drafts.model).resolve()))


# ---- a model ----


def _model(section: Section, finds_models: bool) -> ModelSpec:
    names = section.take("name", str, list) if "name" in section else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise section.error("name", "name is missing: what requests call the model, a name or a list of them")
    roles = _roles(section)
    if finds_models:
        _check_model(section, roles[0].engine)
    return section.record(
        ModelSpec,
        names=(names,) if isinstance(names, str) else tuple(names),
        roles=roles,
        levels=section.section("service-levels").record(ServiceLevels),
        prefill=section.section("remote-prefill").record(PrefillLimits),
        scaling=section.section("scaling").record(ScalingOptions),
        queue=section.section("queue").record(QueueLimits),
    )


def _check_names(section: Section, models: list[ModelSpec]) -> None:
    *others, model = models
    for name in model.names:
        if any(name in other.names for other in others):
            raise section.error("name", f"there is a model {name!r} already")
    if any(app_name(model.name) == app_name(other.name) for other in others):
        raise section.error("name", f"{model.name!r} is too much like the name of another model")


def _roles(section: Section) -> tuple[RoleSpec, ...]:
    model = section.take("model", str) if "model" in section else None
    if model is not None and Path(model).exists():
        model = str(Path(model).resolve())
    profile = options.read_profile(section.take_option(PROFILE)) if "profile" in section else {}
    common = _engine_options(section)
    kinds: list[Role] = [role for role in _ROLES if role in section] or ["aggregated"]
    if ("prefill" in kinds) != ("decode" in kinds):
        other = "decode" if kinds[-1] == "prefill" else "prefill"
        raise section.error(kinds[-1], f"{kinds[-1]} needs {other} beside it")
    if len(kinds) == 3:
        raise section.error("aggregated", "aggregated excludes prefill and decode")
    if "remote-prefill" in section and "prefill" not in kinds:
        raise section.error("remote-prefill", "remote-prefill needs the roles prefill and decode")
    roles = tuple(_role(section.section(kind), kind, model, profile, common) for kind in kinds)
    if len({replace(role.engine.model, tensor_parallel_size=1) for role in roles}) > 1:
        raise section.error("decode", "prefill and decode must have the same model, dtype and max-model-len")
    return roles


def _role(section: Section, role: Role, model: str | None, profile: Values, common: tuple[Section, Values]) -> RoleSpec:
    inner, values = _engine_options(section)
    if _RANKS.name in section:
        values[_RANKS.name] = section.take_option(_RANKS)
    engine = _engine(model, profile, (inner, values), common)
    spec = section.record(RoleSpec, role=role, replicas=_replicas(section), engine=engine)
    given = values | common[1]
    ranks = engine.model.tensor_parallel_size
    if spec.gpus > 1 and _RANKS.name not in given:
        ranks = int(spec.gpus) // spec.data_parallel_size
    of_ranks = replace(engine.model, tensor_parallel_size=ranks)
    return replace(spec, engine=replace(engine, model=of_ranks, quiet=True))


def _replicas(section: Section) -> Replicas:
    if "replicas" not in section:
        return Replicas()
    if section.is_mapping("replicas"):
        return section.section("replicas").record(Replicas)
    count = section.take("replicas", int)
    if count < 1:
        raise section.error("replicas", f"replicas must be at least 1, or a mapping with min and max, not {count}")
    return Replicas(count, count)


def _check_model(section: Section, engine: EngineOptions) -> None:
    """Checks that the server and the engine will find the model."""
    try:
        tokenizer_folder(engine)
        check_local(engine.model)
    except ValueError as error:
        raise section.error("model", str(error)) from None
