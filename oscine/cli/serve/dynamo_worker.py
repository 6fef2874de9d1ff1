"""`oscine dynamo-worker [MODEL]`: an engine behind NVIDIA Dynamo's own frontend and router."""

import argparse
import sys
from pathlib import Path

from oscine.cli.error import USAGE, CommandError
from oscine.cli.parser import Parser
from oscine.cli.serve.options import ENGINE_GROUPS, add_options, add_some
from oscine.cli.serve.read_options import read_config
from oscine.config import Environment, ModelOptions
from oscine.dynamo.options import DynamoOptions
from oscine.option import options_of

_RUNTIME = {
    "namespace": "group of workers and frontends that find each other (default: dynamo)",
    "discovery-backend": "service through which they find each other: etcd, kubernetes, file or mem (default: etcd)",
    "request-plane": "how requests travel: tcp or nats (default: tcp)",
    "event-plane": "how KV events and load travel: zmq or nats (default: zmq)",
    "endpoint": "full name as dyn://NAMESPACE.COMPONENT.ENDPOINT (default: its role's)",
}


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    what = "serve a model to NVIDIA Dynamo's frontend and router"
    parser = commands.add_parser(
        "dynamo-worker",
        help=what,
        usage="%(prog)s [OPTIONS] [MODEL]",
        description="Serve a model to NVIDIA Dynamo's frontend and router (needs the extra `dynamo`).",
        allow_abbrev=False,
    )
    add_options(parser, groups=ENGINE_GROUPS)
    worker = parser.add_argument_group("worker")
    name_help = "name by which clients call the model (default: its own)"
    worker.add_argument("--served-model-name", metavar="NAME", default=argparse.SUPPRESS, help=name_help)
    add_some(worker, options_of(DynamoOptions))
    runtime = parser.add_argument_group(
        "Dynamo's runtime; each is also an environment variable DYN_NAME, as all others"
    )
    for name, text in _RUNTIME.items():
        runtime.add_argument(f"--{name}", metavar="NAME", default=argparse.SUPPRESS, help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    given = {name: value for name, value in vars(args).items() if name not in ("command", "run")}
    runtime = [f"--{name}={given.pop(key)}" for name in _RUNTIME if (key := name.replace("-", "_")) in given]
    own = {option.name: given.pop(option.name) for option in options_of(DynamoOptions) if option.name in given}
    name = given.pop("served_model_name", None)
    try:
        from oscine.dynamo.worker import run
        from oscine.engine.wire.stream import EngineError
    except ModuleNotFoundError as error:
        raise CommandError(
            f"NVIDIA Dynamo is not installed here (no module {error.name}): see docs/dynamo.md"
        ) from None
    config = read_config(given, lambda note: print(f"oscine: {note}", file=sys.stderr))
    try:
        folder = _folder(config.engine.model)
        name = name or (config.server.served_model_names or (_name(config.engine.model),))[0]
        key = Environment.read().cluster_key
        fields = {"folder": folder, "name": name, "engine": config.engine, "key": key}
        run(DynamoOptions.of(own, **fields, runtime=tuple(runtime)))
    except ValueError as error:
        raise CommandError(str(error), USAGE) from None
    except EngineError as error:
        raise CommandError(str(error)) from None


def _folder(model: ModelOptions) -> Path:
    """Raises ValueError."""
    if model.random_weights is not None:
        raise ValueError("--random-weights has no folder with a tokenizer and a chat template, which Dynamo reads")
    from oscine.model.hub import find_folder

    return find_folder(model).resolve()


def _name(model: ModelOptions) -> str:
    return Path(model.model).resolve().name if Path(model.model).is_dir() else model.model
