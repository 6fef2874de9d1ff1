"""The commands of `oscine`. Each is imported when it is used.

Packages outside add commands by entry points of the group `oscine.commands`. The value of such an entry point is a
Command. They are read only if a name is not in the table.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from oscine.cli.error import USAGE, CommandError
from oscine.cli.parser import Parser
from oscine.system.extensions import added, is_there, lacking, load

GROUP = "oscine.commands"


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    help: str
    place: str  # "module:function". The function adds arguments and `run`, which takes the parsed ones, to a Parser

    def arguments(self) -> Callable[[Parser], None]:
        found: Callable[[Parser], None] = load(self.place)
        return found


COMMANDS = (
    Command("serve", "serve a model behind an OpenAI-compatible API", "oscine.cli.serve.command:arguments"),
    Command("chat", "talk to a model in the terminal", "oscine.extensions.terminal.command:arguments"),
    Command("batch", "answer a file of requests", "oscine.extensions.apis.batches.cli.command:arguments"),
    Command("pull", "download a model", "oscine.extensions.formats.cli.command:arguments_of_pull"),
    Command("list", "list the models on this machine", "oscine.extensions.formats.cli.command:arguments_of_list"),
    Command("rm", "remove a downloaded model", "oscine.extensions.formats.cli.command:arguments_of_rm"),
    Command("convert", "convert a model to the published layout", "oscine.extensions.formats.cli.convert:arguments"),
    Command(
        "calibrate",
        "find scales of keys and values for --kv-cache-dtype fp8",
        "oscine.extensions.calibration.command:arguments",
    ),
    Command("bench", "measure a server, the engine or the ops", "oscine.extensions.bench.cli.command:arguments"),
    Command("plan", "find the GPUs, layout and limits that serve a load", "oscine.extensions.plan.cli.plan:arguments"),
    Command("profile", "measure step times, for planning", "oscine.extensions.profile.command:arguments"),
    Command("eval", "measure the quality of a server's answers", "oscine.extensions.eval.cli.command:arguments"),
    Command(
        "verify", "compare a model with transformers, layer by layer", "oscine.extensions.verify.command:arguments"
    ),
    Command(
        "simulate",
        "predict what a deployment does with a load, from step times",
        "oscine.extensions.plan.cli.command:arguments",
    ),
    Command("cluster", "serve models from many engines, on Ray", "oscine.extensions.cluster.cli.command:arguments"),
    Command("doctor", "say what fits this machine, and what is missing", "oscine.extensions.doctor.command:arguments"),
    Command(
        "list-model-profiles", "list NIM's model profiles", "oscine.extensions.doctor.nim_command:arguments_of_list"
    ),
    Command(
        "download-to-cache",
        "download models, by NIM's profiles",
        "oscine.extensions.doctor.nim_command:arguments_of_download",
    ),
    Command(
        "dynamo-worker",
        "serve a model to NVIDIA Dynamo's frontend and router",
        "oscine.extensions.dynamo.command:arguments",
    ),
    Command("completion", "print a completion script for a shell", "oscine.extensions.completion.command:arguments"),
)


def installed() -> list[Command]:
    """Those of the table whose extension is there."""
    return [command for command in COMMANDS if is_there(command.place)]


def find(name: str) -> Command | None:
    """One of the table, or of another package. Raises CommandError if its extension is not installed."""
    for command in COMMANDS:
        if command.name == name:
            if not is_there(command.place):
                raise CommandError(f"oscine {name} {lacking(command.place)}", USAGE)
            return command

    def loaded(entry: EntryPoint) -> Command:
        found = entry.load()
        if not isinstance(found, Command):
            raise TypeError(f"{entry.value} is no Command")
        return found

    return next(added(GROUP, "the command", _warn, loaded, name=name), None)


def _warn(text: str) -> None:
    print(f"oscine: warning: {text}", file=sys.stderr)
