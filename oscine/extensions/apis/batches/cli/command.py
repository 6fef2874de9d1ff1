"""`oscine batch INPUT OUTPUT [MODEL]`: answers a file of requests, with a server or with one that it starts itself."""

import argparse
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from oscine.cli.error import USAGE, CommandError, ended_by
from oscine.cli.parser import Parser
from oscine.cli.serve.options import add_options
from oscine.cli.serve.read_options import read_config
from oscine.cli.server_url import server_at
from oscine.settings.config import NANO, Config
from oscine.system.environment import Environment

_CONCURRENCY = 64  # with a server whose limits are unknown


def arguments(parser: Parser) -> None:
    parser.usage = "%(prog)s [OPTIONS] INPUT OUTPUT [MODEL]"
    parser.description = (
        "Answer a file of requests in OpenAI's batch format, one JSON object per line: custom_id, method, "
        "url and body. The answers come in any order. A run that was ended goes on where it was: run the command "
        "again. The exit status is 1 when a line has no answer. Without --url a server is started for the time, with "
        "MODEL and the options of `oscine serve`."
    )
    parser.add_argument("input", type=Path, metavar="INPUT", help="file of requests")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="file that answers are appended to")
    parser.add_argument(
        "--url", help="server to ask, with the key of OPENAI_API_KEY (default: one is started for the time)"
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help=f"requests under way at once (default: {_CONCURRENCY} with --url, else twice --max-num-seqs)",
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    given = vars(args)
    input_path, output_path, url, concurrency = (given.pop(name) for name in ("input", "output", "url", "concurrency"))
    if url is not None and given:
        raise CommandError("MODEL and its options are for a server that is started here, not for --url", USAGE)
    if concurrency is not None and concurrency < 1:
        raise CommandError(f"--concurrency must be at least 1, not {concurrency}", USAGE)
    if input_path.exists() and output_path.exists() and input_path.samefile(output_path):
        raise CommandError("INPUT and OUTPUT are the same file", USAGE)
    config = _for_one_client(read_config(given))
    import asyncio

    from oscine.extensions.apis.batches.cli.run import BatchRun
    from oscine.extensions.apis.batches.lines import BatchFileError, BatchInput, BatchOutput, FileInUseError

    scheduler = config.engine.scheduler
    here = 2 * (scheduler.most_seqs if Environment().num_gpus else scheduler.max_num_seqs)
    concurrency = concurrency or (here if url is None else _CONCURRENCY)
    with ExitStack() as opened:
        with ended_by(FileInUseError), ended_by(BatchFileError, status=USAGE):
            lines = opened.enter_context(BatchInput.open(input_path))
            output = opened.enter_context(BatchOutput.open(output_path))
        base = opened.enter_context(server_at(url, config))
        asyncio.run(BatchRun(lines, output, base, Environment().api_key, sys.stderr).run(concurrency))
    if output.num_failed:
        raise CommandError(f"failed lines in {output_path}: {output.num_failed:,}; each says why")


def _for_one_client(config: Config) -> Config:
    """The configuration of a server for this batch alone: no other client reaches it."""
    if config.models.on_demand:
        raise CommandError("--models and --models-dir are for `oscine serve`", USAGE)
    server = replace(config.server, host="127.0.0.1", port=0, api_keys=(), admin_keys=())
    server = replace(server, drain_s=0.0, log_level="warning")
    engine = replace(config.engine, quiet=config.engine.model.model == NANO)  # there in a moment: nothing to report
    return replace(config, engine=engine, server=server)
