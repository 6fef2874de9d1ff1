"""What may be typed besides messages, such as `/effort high`: one table, which help and errors follow."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from oscine.chat.effort import EFFORTS
from oscine.cli.error import USAGE, CommandError
from oscine.extensions.terminal.conversation import Conversation
from oscine.settings.option import did_you_mean

_COMMAND = re.compile(r"(/\w*|/\?)(?:\s+(.*))?", re.DOTALL)  # and not /etc/hosts, which begins a message
KEYS = '""" begins and ends a message of several lines, ctrl-C stops an answer, ctrl-D leaves'


class Bye(Exception):  # noqa: N818
    """The person leaves."""


@dataclass(frozen=True, slots=True)
class Slash:
    usage: str
    what: str
    run: Callable[[Conversation, str], str | None]  # of the text behind the name; returns a note. Raises CommandError.


def obey(text: str, conversation: Conversation) -> str | None:
    """Does what the text says: a command, or a message that is asked. Returns a note. Raises CommandError."""
    found = _COMMAND.fullmatch(text)
    if found is None:
        if text:
            conversation.ask(text)
        return None
    name, argument = _ALIASES.get(found[1], found[1]), (found[2] or "").strip()
    if name not in SLASHES:
        raise CommandError(f"{name} is no command{did_you_mean(name, SLASHES)} (/help lists them)", USAGE)
    return SLASHES[name].run(conversation, argument)


def _help(conversation: Conversation, argument: str) -> str:
    rows = [(slash.usage, slash.what) for slash in SLASHES.values()]
    width = max(len(usage) for usage, _ in rows)
    return "\n".join([*(f"{usage:{width}}  {what}" for usage, what in rows), KEYS])


def _effort(conversation: Conversation, argument: str) -> str:
    if argument and argument not in EFFORTS:
        raise CommandError(f"/effort takes one of {', '.join(EFFORTS)}{did_you_mean(argument, EFFORTS)}", USAGE)
    if argument:
        conversation.settings["reasoning_effort"] = argument
    return f"effort: {conversation.settings['reasoning_effort']}"


def _system(conversation: Conversation, argument: str) -> str:
    if argument:
        conversation.instructions = "" if argument == "none" else argument
    return f"instructions: {conversation.instructions or 'none'}"


def _reset(conversation: Conversation, argument: str) -> None:
    conversation.reset()


def _bye(conversation: Conversation, argument: str) -> None:
    raise Bye


SLASHES = {
    slash.usage.split()[0]: slash
    for slash in (
        Slash("/help", "list the commands", _help),
        Slash("/system [TEXT]", "show the instructions of the conversation, or set them; none removes them", _system),
        Slash("/effort [EFFORT]", f"show or set the effort of the reasoning: {', '.join(EFFORTS)}", _effort),
        Slash("/reset", "forget the conversation, and keep the instructions", _reset),
        Slash("/bye", "leave", _bye),
    )
}
_ALIASES = {"/?": "/help", "/clear": "/reset", "/exit": "/bye", "/quit": "/bye"}  # habits from Ollama and others
BRIEF = f"{', '.join(SLASHES)}; {KEYS}"
