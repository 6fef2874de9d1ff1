"""`oscine batch INPUT OUTPUT [MODEL]`: answers a file of requests, with a server or with one that it starts itself."""

import argparse
import asyncio
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from oscine.cli.error import USAGE, CommandError
from oscine.cli.parser import Parser
from oscine.cli.serve.options import add_options
from oscine.cli.serve.read_options import read_config
from oscine.cli.server_url import server_url
from oscine.config import NANO, Config, Environment

_OWN = ("command", "run", "input", "output", "url", "concurrency")
_CONCURRENCY = 64  # with a server whose limits are unknown


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    what = "answer a file of requests"
    parser = commands.add_parser(
        "batch",
        help=what,
        usage="%(prog)s [OPTIONS] INPUT OUTPUT [MODEL]",
        description="Answer a file of requests in OpenAI's batch format, one JSON object a line: custom_id, method, "
        "url and body. The answers come in any order. A run that was ended goes on where it was: run the command "
        "again. The exit status is 1 when a line has no answer. Without --url a server is started for the time, with "
        "MODEL and the options of `oscine serve`.",
        allow_abbrev=False,
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
    given = {name: value for name, value in vars(args).items() if name not in _OWN}
    if args.url is not None and given:
        raise CommandError("MODEL and its options are for a server that is started here, not for --url", USAGE)
    if args.concurrency is not None and args.concurrency < 1:
        raise CommandError(f"--concurrency must be at least 1, not {args.concurrency}", USAGE)
    if args.input.exists() and args.output.exists() and args.input.samefile(args.output):
        raise CommandError("INPUT and OUTPUT are the same file", USAGE)
    config = _config(given)
    from oscine.cli.batch.files import BatchInput, BatchOutput
    from oscine.cli.batch.run import BatchRun

    here = 2 * config.engine.scheduler.max_num_seqs
    concurrency = args.concurrency or (here if args.url is None else _CONCURRENCY)
    with BatchInput(args.input) as lines, BatchOutput(args.output) as output, _server(args.url, config) as url:
        asyncio.run(BatchRun(lines, output, url, Environment.read().api_key, sys.stderr).run(concurrency))
    if output.failed:
        raise CommandError(f"failed lines in {args.output}: {output.failed:,}; each says why")


def _config(given: dict[str, Any]) -> Config:
    """Of a server for this batch alone: nobody else reaches it."""
    config = read_config(given, lambda note: print(f"oscine: {note}", file=sys.stderr))
    server = replace(config.server, host="127.0.0.1", port=0, api_keys=(), drain_s=0.0, log_level="warning")
    engine = replace(config.engine, quiet=config.engine.model.model == NANO)  # there in a moment: nothing to report
    return replace(config, engine=engine, server=server)


def _server(url: str | None, config: Config) -> AbstractContextManager[str]:
    if url is not None:
        return nullcontext(server_url(url))
    from oscine.cli.local_server import LocalServer

    return LocalServer(config)
