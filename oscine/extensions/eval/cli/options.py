"""The options of `oscine eval`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscine.chat.effort import EFFORTS
from oscine.extensions.eval.published import SETS
from oscine.settings.option import OptionError, Options, option


@dataclass(frozen=True)
class Asked(Options, group="tasks"):
    tasks: str | None = option(
        None,
        f"tasks: a file of JSON lines (docs/eval.md), or a test set of the Hugging Face hub, {', '.join(SETS)}",
        "FILE|NAME",
    )
    limit: int | None = option(
        None, "number of tasks, the same ones in every run", "N", shown="all of them", at_least=1
    )
    samples: int = option(1, "number of answers per task", "N", at_least=1)
    output: tuple[str, ...] = option(
        (),
        "files that answers are appended to, one per server; a run goes on where its file ends",
        "FILE",
        nargs="+",
        shown="none",
    )


@dataclass(frozen=True)
class Requests(Options, group="requests"):
    concurrency: int = option(64, "requests under way at once", "N", at_least=1)
    model: str | None = option(None, "model that the requests name", "NAME", shown="the server's first model")
    api_key: str | None = option(None, "API key of the servers", "KEY", shown="OPENAI_API_KEY")
    reasoning_effort: str | None = option(
        None, "effort of the reasoning", choices=tuple(EFFORTS), shown="the server's own"
    )
    temperature: float | None = option(
        None, "temperature of sampling; 0 is greedy", "T", shown="the server's own", at_least=0
    )
    top_p: float | None = option(
        None, "probability of the tokens that are sampled from", "P", shown="the server's own", above=0, at_most=1
    )
    max_tokens: int | None = option(
        None, "most tokens of an answer, reasoning included", "TOKENS", shown="the context's end", at_least=1
    )
    seed: int | None = option(
        None, "seed of a task's first answer; the next ones have the next seeds", "SEED", shown="none", at_least=0
    )
    timeout: float = option(3600.0, "seconds after which an answer counts as failed", "SECONDS", above=0)

    @property
    def parameters(self) -> dict[str, Any]:
        """Of every request, unless the task has its own."""
        names = ("reasoning_effort", "temperature", "top_p", "max_tokens", "seed")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def outputs(asked: Asked, num_servers: int) -> list[Path | None]:
    """The file of each server. Raises OptionError."""
    if not asked.output:
        return [None] * num_servers
    paths: list[Path | None] = [Path(name) for name in asked.output]
    if len(paths) != num_servers:
        raise OptionError("output", f"needs a file for each of {num_servers} servers, not {len(paths)}")
    if len({path.resolve() for path in paths if path is not None}) != num_servers:
        raise OptionError("output", "names the same file twice")
    return paths
