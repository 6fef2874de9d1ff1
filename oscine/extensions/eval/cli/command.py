"""`oscine eval URL [URL]` and `oscine eval compare FILE FILE`: the quality of answers, of one server or of two."""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from oscine.cli.error import USAGE, CommandError, ended_by
from oscine.cli.parser import Parser
from oscine.cli.serve.options import add_some
from oscine.extensions.eval.cli.options import Asked, Requests, outputs
from oscine.settings.option import options_of
from oscine.system.environment import Environment

if TYPE_CHECKING:
    from oscine.extensions.eval.results import Row, Run
    from oscine.extensions.eval.task import Task

COMPARE = "compare"
SKILLS = "skills"  # of the embedded model; their tasks are made in a clone


def arguments(parser: Parser) -> None:
    parser.usage = "%(prog)s URL [URL] --tasks FILE|NAME [OPTIONS]\n       %(prog)s compare FILE FILE"
    parser.description = (
        "Ask servers with OpenAI's API the questions of a task file or a test set, and grade the answers. "
        "Prints the accuracy per group of tasks, with 95 % confidence intervals. With two servers, or two files of "
        "answers, it also prints the difference with its test, and the tasks that changed. The exit status is 1 when "
        "a request failed."
    )
    parser.add_argument(
        "place", nargs="+", metavar="URL", help="server to ask, such as http://127.0.0.1:8000; a second one is compared"
    )
    for section in (Asked, Requests):
        add_some(parser.add_argument_group(section.group), options_of(section))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    given = vars(args)
    first, *others = given.pop("place")
    if first == COMPARE:
        if given or len(others) != 2:
            raise CommandError("compare takes two files of answers, and no options", USAGE)
        _compare_files(Path(others[0]), Path(others[1]))
        return
    if len(others) > 1:
        raise CommandError("eval takes one server or two", USAGE)
    with ended_by(ValueError, status=USAGE):
        asked, requests = Asked.of(given), Requests.of(given)
        files = outputs(asked, 1 + len(others))
    _evaluate((first, *others), asked, requests, files)


def _evaluate(urls: Sequence[str], asked: Asked, requests: Requests, files: Sequence[Path | None]) -> None:
    from oscine.extensions.eval import report
    from oscine.extensions.eval.compare import Comparison

    tasks = _tasks(asked)
    runs = _runs(urls, requests)
    print(f"{asked.tasks}: {len(tasks):,} tasks, answers per task: {asked.samples}", flush=True)
    answers = []
    for (url, run), path in zip(runs, files, strict=True):
        rows = _answers(url, run, path, tasks, asked.samples, requests)
        print("", f"{url}, {run.model}", *report.table(rows, asked.samples), *report.errors(rows), sep="\n", flush=True)
        answers.append(rows)
    if len(answers) == 2:
        found = Comparison.of(*answers)
        print("", *report.comparison(found, ("the first server", "the second server")), sep="\n")
    if failed := sum(bool(row.error) for rows in answers for row in rows):
        raise CommandError(f"failed requests, which count as wrong answers: {failed:,}")


def _runs(urls: Sequence[str], requests: Requests) -> "list[tuple[str, Run]]":
    """The address of each server, and what its answers have in common."""
    from oscine.extensions.bench.serve.target import Target, TargetError
    from oscine.extensions.eval.results import Run

    key = requests.api_key or Environment().api_key
    with ended_by(ValueError, status=USAGE), ended_by(TargetError):
        targets = [Target.parse(url, key) for url in urls]
        return [(target.url, Run(target.find_model(requests.model), requests.parameters)) for target in targets]


def _answers(
    url: str, run: "Run", path: Path | None, tasks: "Sequence[Task]", samples: int, requests: Requests
) -> "list[Row]":
    import asyncio

    from oscine.extensions.eval.cli.run import EvalRun, Server
    from oscine.extensions.eval.results import ResultsFile

    server = Server(url, requests.api_key or Environment().api_key, requests.timeout)
    with ExitStack() as opened:
        output = None
        if path is not None:
            with ended_by(ValueError, OSError, status=USAGE):
                output = ResultsFile(path, run, tasks)
            opened.callback(output.close)
        return asyncio.run(EvalRun(server, run, output).answers(tasks, samples, requests.concurrency))


def _tasks(asked: Asked) -> "list[Task]":
    from oscine.extensions.eval import published, task

    name = asked.tasks
    if name is None:
        raise CommandError("eval needs --tasks (see oscine eval --help)", USAGE)
    if name == SKILLS and not Path(name).exists():
        raise CommandError(
            "the tasks of the embedded model's skills are made in a clone of the repository: "
            "python -m training.tasks skills.jsonl, then --tasks skills.jsonl",
            USAGE,
        )
    try:
        with ended_by(ValueError, OSError, status=USAGE):
            found = published.load(name) if name in published.SETS else task.read(Path(name))
    except ModuleNotFoundError as error:
        if error.name != "jsonschema":
            raise
        raise CommandError("a task with an expected schema needs jsonschema: pip install 'oscine[eval]'") from None
    return task.some(found, asked.limit)


def _compare_files(first: Path, second: Path) -> None:
    from oscine.extensions.eval import report, results
    from oscine.extensions.eval.compare import Comparison

    with ended_by(ValueError, OSError, status=USAGE):
        rows = [[*results.read(path)[1].values()] for path in (first, second)]
        found = Comparison.of(*rows)
    for path, some in zip((first, second), rows, strict=True):
        print(f"{path}", *report.table(some, max(row.sample for row in some) + 1), "", sep="\n")
    print(*report.comparison(found, (str(first), str(second))), sep="\n")
