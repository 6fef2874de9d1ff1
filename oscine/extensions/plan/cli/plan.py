"""`oscine plan`: which GPUs, layout and limits serve a load within goals, and what that takes."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from oscine.cli.error import USAGE, CommandError, ended_by
from oscine.cli.parser import Parser
from oscine.extensions.bench.cli.extra import need_matplotlib
from oscine.extensions.bench.cli.load_options import Sending, Workload
from oscine.extensions.plan.cli.command import OF_SENDING, OF_WORKLOAD, add_load, add_sections
from oscine.extensions.plan.validate.command import add_options, validate
from oscine.settings.option import BYTES, OptionError, either, read_size, require

if TYPE_CHECKING:
    from oscine.extensions.plan.search.answer import Answer
    from oscine.extensions.plan.search.question import Question, Traffic
    from oscine.extensions.plan.search.trials import Simulate
    from oscine.extensions.plan.sources.gpus import Gpu
    from oscine.extensions.plan.sources.origin import Source

_MOST_GPUS = 4096


def arguments(parser: Parser) -> None:
    parser.usage = (
        "%(prog)s [--model MODEL] (--gpus GPU:COUNT | --budget MONEY --price GPU:MONEY) "
        "(--users N | --rate R | --trace FILE) [OPTIONS]"
    )
    parser.description = (
        "Find the layout of GPUs and the limits of engines that serve a load within goals for the most tokens per "
        "money. All layouts are estimated, some simulated, and two simulated in whole; see docs/planning.md."
    )
    parser.add_argument("--model", default="120b", metavar="MODEL", help="20b, 120b, or a model (default: 120b)")
    hardware = parser.add_mutually_exclusive_group()
    hardware.add_argument(
        "--gpus", nargs="+", metavar="GPU:COUNT", help="GPUs that there are, such as H200:8; several are alternatives"
    )
    hardware.add_argument(
        "--budget", type=float, metavar="MONEY", help="money per hour that GPUs may cost, by the prices of --price"
    )
    parser.add_argument(
        "--price", nargs="+", default=[], metavar="GPU:MONEY", help="money per hour and GPU (default: not known)"
    )
    for name, what in (("ttft", "time to the first token"), ("tpot", "time per further token")):
        parser.add_argument(
            f"--{name}",
            nargs="+",
            default=[],
            metavar="STATISTIC:MS",
            help=f"limits of the {what}, for mean, p50, p90, p95 or p99 (default: none)",
        )
    parser.add_argument(
        "--steps",
        nargs="+",
        default=[],
        metavar="TABLE",
        help="step times: files of `oscine profile`, or GPU/KERNELS, such as h200/vllm (default: Oscine's own if they "
        "were measured on the GPU, else those of TensorRT-LLM)",
    )
    parser.add_argument("--scaled", action="store_true", help="extrapolate step times beyond the measured ones")
    parser.add_argument("--gpu-memory", metavar=BYTES, help="memory of a GPU (default: that of the GPU)")
    parser.add_argument(
        "--acceptance", type=float, metavar="SHARE", help="of drafts; estimates their worth where a table has them"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="SEED", help="first seed of simulations (default: 0)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for deployment.yaml and the page index.html; needs matplotlib (default: none)",
    )
    add_load(parser, required=False)
    add_sections(parser, {Workload: OF_WORKLOAD, Sending: OF_SENDING})
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if args.validate:
        validate(refit=args.fit)
        show_rack()
        return
    from oscine.extensions.plan.search.trials import processes

    with ended_by(ValueError, OSError, status=USAGE):
        question = question_of(args)
        if args.output is not None:
            need_matplotlib("page")
            args.output.mkdir(parents=True, exist_ok=True)
    with _progress() as bar, ended_by(ValueError, OSError, LookupError), processes(bar.ended) as simulate:
        answer = answered(question, simulate, bar, args.acceptance)
    show(answer, args.output)


def show_rack() -> None:
    """Prints the way from a published figure to the audited ones. Raises CommandError."""
    from oscine.extensions.plan.search import rack
    from oscine.extensions.plan.search.trials import processes

    print("\nA rack of 72 GPUs: published 1.50 million tokens/s, audited figures of MLPerf Inference v6.1")
    with ended_by(ValueError, OSError), processes(lambda count: None) as simulate:
        for line in rack.lines({name: rack.results(name, simulate) for name in rack.HARDWARE}):
            print(line)


def question_of(args: argparse.Namespace) -> "Question":
    """Raises ValueError."""
    from oscine.extensions.plan.search.goals import Goal, Goals
    from oscine.extensions.plan.search.question import Question, Traffic
    from oscine.extensions.plan.sources.origin import Source

    given = vars(args)
    require(not args.fit, "fit", "given with --validate", None)
    is_loaded = any(given[name] is not None for name in ("users", "rate", "trace"))
    require(is_loaded, "users", "given, or --rate or --trace", None)
    for name in ("users", "rate", "budget"):
        require(given[name] is None or 0 < given[name] < 1e12, name, "positive", given[name])
    require(args.acceptance is None or 0 <= args.acceptance <= 1, "acceptance", "from 0 to 1", args.acceptance)
    require(args.seed >= 0, "seed", "at least 0", args.seed)
    prices = dict(_price(text) for text in args.price)
    traffic = Traffic(Workload.of(given), Sending.of(given), args.users, args.rate, args.trace)
    if args.trace is None:
        traffic.sending.arrival(args.users, args.rate)  # checks them together
    hardware, sources = tuple(_hardware(args, prices)), tuple(Source.of(text) for text in args.steps)
    _check_model(args.model, sources, traffic)
    _check_sources(sources, [gpu for gpu, _ in hardware])
    return Question(
        args.model,
        hardware,
        traffic,
        Goals(tuple(Goal.of(name, text) for name in ("ttft", "tpot") for text in given[name])),
        sources,
        tuple(prices.items()),
        args.scaled,
        None if args.gpu_memory is None else _size(args.gpu_memory),
        args.seed,
    )


def _check_sources(sources: "Sequence[Source]", gpus: "Sequence[Gpu]") -> None:
    """All of them are of GPUs that there are, and each of these has one. Raises OptionError, ValueError and OSError."""
    for source in sources:
        if not any(source.is_of(gpu) for gpu in gpus):
            names = ", ".join(gpu.name for gpu in gpus)
            raise OptionError(
                "steps", f"must have step times of {names}; {source.text} is of {source.gpu_text}", "gpus"
            )
    for gpu in gpus:
        if sources and not any(source.is_of(gpu) for source in sources):
            raise OptionError("steps", f"must have step times of {gpu.name}, too", "gpus")


def _check_model(model: str, sources: "Sequence[Source]", traffic: "Traffic") -> None:
    """Whether its step times can be known, and the load fits its context. Raises ValueError and OSError."""
    from oscine.checkpoint.hub import shapes_of
    from oscine.extensions.plan.foreign.compose import MODELS
    from oscine.extensions.plan.run.scenario import check_lengths
    from oscine.extensions.plan.search.deployed import full_name
    from oscine.extensions.plan.sources.origin import is_published
    from oscine.settings.config import ModelOptions

    if not sources or any(source.file is None for source in sources):
        known = either(tuple(sorted(MODELS, reverse=True)))
        require(is_published(model), "model", f"{known}, or a model of which --steps names a table", model)
    if (config := shapes_of(ModelOptions(full_name(model)))) is None:
        return
    for source in sources:
        source.check_model(model, config)
    if traffic.trace is None:
        check_lengths(traffic.workload, config.max_position_embeddings, model)


def _size(text: str) -> int:
    try:
        size = read_size(text, BYTES)
    except ValueError:
        raise OptionError("gpu-memory", f"must be a number of bytes, such as 141GiB, not {text!r}") from None
    require(size > 0, "gpu-memory", "positive", text)
    return size


def _price(text: str) -> tuple[str, float]:
    from oscine.extensions.plan.sources.gpus import gpu_of

    name, _, money = text.partition(":")
    try:
        price = float(money)
    except ValueError:
        price = 0.0
    require(0 < price < 1e9, "price", "a GPU and the money per hour, as H200:3.50", text)
    return gpu_of(name, "price").name, price


def _hardware(args: argparse.Namespace, prices: dict[str, float]) -> "Iterator[tuple[Gpu, int]]":
    """GPUs and their numbers."""
    from oscine.extensions.plan.sources.gpus import gpu_of

    if args.budget is not None:
        require(bool(prices), "budget", "given with --price", None)
        counts = {name: int(args.budget / price) for name, price in prices.items()}
        require(any(counts.values()), "budget", f"at least {min(prices.values()):g}, for one GPU", args.budget)
        yield from ((gpu_of(name), min(count, _MOST_GPUS)) for name, count in counts.items() if count)
        return
    require(bool(args.gpus), "gpus", "given, or --budget with --price", None)
    seen = set()
    for text in args.gpus:
        name, _, number = text.partition(":")
        gpu, count = gpu_of(name), int(number) if number.isdecimal() else 0
        require(1 <= count <= _MOST_GPUS, "gpus", f"a GPU and their number up to {_MOST_GPUS}, as H200:8", text)
        require(gpu.name not in seen, "gpus", "different kinds of GPUs", text)
        seen.add(gpu.name)
        yield gpu, count
    if len(seen) > 1:
        require(seen <= prices.keys(), "gpus", "of one kind, or all with a --price to compare them by", args.gpus)
    for name in prices:
        require(name in seen, "price", f"of a GPU of --gpus ({', '.join(sorted(seen))})", name)


def answered(question: "Question", simulate: "Simulate", bar: "_Progress", acceptance: float | None = None) -> "Answer":
    """Raises CommandError if the goals are not met, and ValueError if nothing fits or is known."""
    from oscine.extensions.plan.answer.text import unmet
    from oscine.extensions.plan.search.answer import answer_of
    from oscine.extensions.plan.search.rounds import meets, search

    found = search(question, simulate, bar.say)
    bar.say("without a node", 1)
    answer = answer_of(found, simulate, acceptance)
    if not meets(question, answer.best):
        raise CommandError(unmet(answer))
    return answer


def show(answer: "Answer", output: Path | None) -> None:
    from oscine.extensions.plan.answer import text

    question = answer.found.question
    print(text.title(question))
    for name, value in text.lines(answer):
        print(f"{name:<20} {value}")
    print("\nPareto front, estimated: tokens/s per GPU against tokens/s per user")
    for line in (text.FRONT, *text.front_lines(answer)):
        print(f"{line[0]:<20}{line[1]:>22}{line[2]:>20}{line[3]:>20}")
    if output is not None:
        with ended_by(OSError):
            _write(answer, output)


def _write(answer: "Answer", output: Path) -> None:
    from oscine.extensions.cluster.cli.deployment_text import deployment_text
    from oscine.extensions.plan.answer import page, text
    from oscine.extensions.plan.search.deployed import deployment_of

    question, best = answer.found.question, answer.best
    file = output / "deployment.yaml"
    deployment = deployment_of(question.model, best.candidate, question.traffic.users or 0)
    file.write_text(deployment_text(deployment), "utf-8")
    page.write(output / "index.html", answer)
    print(f"\nwritten: {file}, {output / 'index.html'}")
    if best.share == 1.0:
        scenario = best.scenario(question, 0)
        print(f"the figures of the first seed: {text.simulate_command(file, scenario)}")


class _Progress:
    """A line on stderr, if that is a terminal."""

    def __init__(self) -> None:
        self._what, self._done, self._all = "", 0, 0
        self._is_shown = sys.stderr.isatty()

    def say(self, what: str, count: int) -> None:
        """What is done now, and in how many simulations."""
        self._what, self._done, self._all = what, 0, count
        self._show()

    def ended(self, count: int) -> None:
        self._done += count
        self._show()

    def _show(self) -> None:
        if self._is_shown:
            bar = f"{'#' * self._done}{'.' * (self._all - self._done)}"
            sys.stderr.write(f"\r\x1b[K{self._what} {bar}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")


@contextmanager
def _progress() -> Iterator[_Progress]:
    bar = _Progress()
    try:
        yield bar
    finally:
        bar.clear()
