"""`oscine chat [PROMPT]`: a conversation in the terminal, with a server or with one that it starts itself."""

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from oscine.chat.effort import DEFAULT, EFFORTS
from oscine.cli.error import FAILED, USAGE, CommandError
from oscine.cli.parser import Parser
from oscine.cli.server_url import client_settings, server_at
from oscine.extensions.terminal.messages import read_lines, reader, unquoted
from oscine.extensions.terminal.output import Terminal
from oscine.settings.config import NANO, Config, EngineOptions, ModelOptions, ServerOptions
from oscine.system.environment import Environment

if TYPE_CHECKING:
    from oscine.extensions.terminal.conversation import Conversation

MAX_TOKENS = 4096  # per answer, if the context has room for as many
_HISTORY = "chat_history"  # file of earlier messages, in the folder for state


def arguments(parser: Parser) -> None:
    parser.description = (
        "Talk to a model in the terminal. Without PROMPT a conversation begins. In it a paste is one message, "
        "and /help lists what else may be typed. In a pipe, each line is a message."
    )
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="question that is answered once; the output may be piped (default: a conversation begins)",
    )
    parser.add_argument(
        "--url", help="server to ask, with the key of OPENAI_API_KEY (default: that of OSCINE_URL, else one is started)"
    )
    parser.add_argument(
        "--model", help=f"name of the model, or the model of a server that is started (default: the first, or {NANO})"
    )
    parser.add_argument(
        "--effort", choices=EFFORTS, default=DEFAULT, help=f"effort of the reasoning (default: {DEFAULT})"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        help="temperature of sampling; 0 is greedy (default: the server's own; 0 for the embedded model)",
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="TOKENS", help=f"most tokens of one answer (default: {MAX_TOKENS})"
    )
    parser.hint_of_further_words = "; PROMPT is one argument, in quotes, and --model names the model"
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if args.prompt is not None and not args.prompt.strip():
        raise CommandError("PROMPT is empty: without one, a conversation begins", USAGE)
    environment = Environment()
    out = sys.stdout
    terminal = Terminal(out, color=out.isatty() and not environment.no_color)
    notes = Terminal(sys.stderr, color=sys.stderr.isatty() and not environment.no_color)
    url = args.url or environment.base_url
    embedded = not url and args.model in (None, NANO)
    settings = {
        "model": args.model if url else None,
        "reasoning_effort": args.effort,
        "temperature": 0.0 if args.temperature is None and embedded else args.temperature,
        "max_tokens": args.max_tokens,
    }
    import httpx

    from oscine.extensions.terminal.conversation import Conversation

    history = environment.state_folder / "oscine" / _HISTORY
    with (
        reader(history) if args.prompt is None else nullcontext(read_lines) as read,
        server_at(url, _config(args.model or NANO)) as base,
        httpx.Client(**client_settings(base, environment.api_key)) as client,
    ):
        conversation = Conversation(client, settings, MAX_TOKENS, terminal, notes)
        if args.prompt is not None:
            conversation.ask(args.prompt)
        else:
            _converse(conversation, notes, read)


def _config(model: str) -> Config:
    """The configuration of a server for this conversation.

    The embedded model starts in a moment, so it starts without a message.
    """
    engine = EngineOptions(model=ModelOptions(model=model), quiet=model == NANO)
    return Config(engine, ServerOptions(port=0, drain_s=0.0, log_level="warning"))


def _converse(conversation: "Conversation", notes: Terminal, read: Callable[[], str]) -> None:
    from oscine.extensions.terminal.slash import BRIEF, Bye, obey

    if read is not read_lines:
        notes.note(BRIEF)
    failures = 0
    while True:
        try:
            text = unquoted(read().strip())
        except EOFError:
            break
        except KeyboardInterrupt:
            notes.note("ctrl-D leaves")
            continue
        try:
            note = obey(text, conversation)
        except Bye:
            break
        except KeyboardInterrupt:
            note = "stopped"
        except CommandError as error:
            note = f"error: {error}"
            failures += error.status == FAILED
        if note is not None:
            notes.note(note)
    if failures and read is read_lines:  # a program may depend on it; a person has seen it
        raise CommandError(f"messages without an answer: {failures}")
