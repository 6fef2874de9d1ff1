"""`oscine serve [MODEL]`: starts the server and says where it is."""

import argparse
import dataclasses
import logging
import time

import oscine
from oscine.cli.error import USAGE, ended_by
from oscine.cli.parser import Parser
from oscine.cli.serve.options import add_options
from oscine.cli.serve.read_options import read_config
from oscine.settings.config import NANO, Config
from oscine.system.environment import Environment
from oscine.types import EngineInfo

_LOGGER = logging.getLogger(__name__)
_EXAMPLE = '{"messages": [{"role": "user", "content": "What is 27 + 58?"}]}'


def arguments(parser: Parser) -> None:
    parser.usage = "%(prog)s [OPTIONS] [MODEL]"
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    started_s = time.perf_counter()
    notes: list[str] = []
    environment = Environment()
    given = read_config(vars(args), notes.append, environment.num_gpus, environment.nim)
    config = _with_environment(given, environment)
    from oscine.api.apis import check_options, make_service
    from oscine.api.server import ServerError, serve
    from oscine.api.telemetry.logs import start_logging

    with ended_by(ValueError, status=USAGE):
        check_options(given)
    start_logging(config.server.log_level, config.server.log_format)
    for note in notes:
        _LOGGER.info(note)

    from oscine.checkpoint.hub import check_local

    with ended_by(ValueError):  # before it listens
        check_local(config.engine.model)
    service = None
    if config.models.on_demand:
        with ended_by(ValueError, status=USAGE):
            service = make_service(config)
    elif config.server.data_parallel_size > 1:
        from oscine.api.serving.placement import place

        with ended_by(ValueError, status=USAGE):
            service = make_service(config)
            place(service, config, environment.num_gpus)
    with ended_by(ServerError):
        serve(config, lambda url, info: _announce(config, url, info, time.perf_counter() - started_s), service)


def _with_environment(config: Config, environment: Environment) -> Config:
    """Responses and files of a published model outlive its server; those of the embedded and the fake one do not."""
    server, engine = config.server, config.engine
    keys = (*server.api_keys, *filter(None, [environment.server_api_key]))
    admin_keys = (*server.admin_keys, *filter(None, [environment.server_admin_key]))
    names = {engine.model.model} if not config.models.on_demand else {*config.models.models, config.models.models_dir}
    is_published = bool(names - {NANO, None}) and engine.executor != "fake"
    folder = environment.state_folder / "oscine"
    responses_db = server.responses_db or (str(folder / "responses.db") if is_published else ":memory:")
    server = dataclasses.replace(
        server,
        api_keys=keys,
        admin_keys=admin_keys,
        traces=environment.traces,
        responses_db=responses_db,
        files_dir=server.files_dir or (":temporary:" if responses_db == ":memory:" else str(folder / "files")),
    )
    search = dataclasses.replace(config.tools.file_search, embeddings_key=environment.embeddings_key)
    return dataclasses.replace(config, server=server, tools=dataclasses.replace(config.tools, file_search=search))


def _announce(config: Config, url: str, info: EngineInfo, startup_s: float) -> None:
    name = next((name for name in config.server.served_model_names if name != "*"), None)
    key = " \\\n    -H 'Authorization: Bearer KEY'" if config.server.api_keys or config.server.api_keys_file else ""
    print(
        f"oscine {oscine.__version__} serves {name or info.model} at {url} "
        f"(context {info.max_model_len} tokens, ready in {startup_s:.1f} s). Try:\n"
        f"  curl {url}/v1/chat/completions{key} \\\n"
        f"    -H 'Content-Type: application/json' \\\n    -d '{_EXAMPLE}'",
        flush=True,
    )
