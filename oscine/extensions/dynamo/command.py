"""`oscine dynamo-worker [MODEL]`: an engine behind NVIDIA Dynamo's own frontend and router."""

import argparse
from dataclasses import replace
from pathlib import Path

from oscine.cli.error import USAGE, CommandError, ended_by
from oscine.cli.parser import Parser
from oscine.cli.serve.options import ENGINE_GROUPS, add_options, add_some
from oscine.cli.serve.read_options import read_config
from oscine.extensions.dynamo.options import DynamoOptions
from oscine.settings.config import OPTIONS, ModelOptions
from oscine.settings.option import options_of
from oscine.system.environment import Environment

_NAME = replace(OPTIONS["served-model-name"], help="name by which clients call the model", shown="its own", nargs=None)
_RUNTIME = {
    "namespace": "group of workers and frontends that find each other (default: dynamo)",
    "discovery-backend": "service through which they find each other: etcd, kubernetes, file or mem (default: etcd)",
    "request-plane": "how requests travel: tcp or nats (default: tcp)",
    "event-plane": "how KV events and load travel: zmq or nats (default: zmq)",
    "endpoint": "full name as dyn://NAMESPACE.COMPONENT.ENDPOINT (default: its role's)",
}


def arguments(parser: Parser) -> None:
    parser.usage = "%(prog)s [OPTIONS] [MODEL]"
    parser.description = "Serve a model to NVIDIA Dynamo's frontend and router (needs the extra `dynamo`)."
    add_options(parser, groups=ENGINE_GROUPS)
    worker = parser.add_argument_group("worker")
    add_some(worker, (_NAME, *options_of(DynamoOptions)))
    runtime = parser.add_argument_group(
        "Dynamo's runtime; each is also an environment variable DYN_NAME, as all others"
    )
    for name, text in _RUNTIME.items():
        runtime.add_argument(f"--{name}", dest=name, metavar="NAME", default=argparse.SUPPRESS, help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    given = vars(args)
    runtime = [f"--{name}={given.pop(name)}" for name in _RUNTIME if name in given]
    own = {option.name: given.pop(option.name) for option in options_of(DynamoOptions) if option.name in given}
    try:
        from oscine.engine.wire.stream import EngineError
        from oscine.extensions.dynamo.worker import run
    except ModuleNotFoundError as error:
        raise CommandError(
            f"NVIDIA Dynamo is not installed here (no module {error.name}): see docs/dynamo.md"
        ) from None
    config = read_config(given)
    with ended_by(ValueError, status=USAGE), ended_by(EngineError):
        folder = _folder(config.engine.model)
        name, *_ = config.server.served_model_names or (_name(config.engine.model),)
        key = Environment().cluster_key
        fields = {"folder": folder, "name": name, "engine": config.engine, "key": key}
        run(DynamoOptions.of(own, **fields, runtime=tuple(runtime)))


def _folder(model: ModelOptions) -> Path:
    """Raises ValueError."""
    if model.random_weights is not None:
        raise ValueError("--random-weights has no folder with a tokenizer and a chat template, which Dynamo reads")
    from oscine.checkpoint.hub import find_model

    found = find_model(model).resolve()
    if found.is_file():
        raise ValueError(f"{found}: Dynamo reads no chat template from a GGUF file; use a folder with safetensors")
    return found


def _name(model: ModelOptions) -> str:
    return Path(model.model).resolve().name if Path(model.model).is_dir() else model.model
