"""The answer of a plan as one HTML page, in the style of the page of `oscine bench sweep`."""

from pathlib import Path

from oscine.extensions.bench.serve import pareto
from oscine.extensions.bench.serve.page import Table, pictures, write_page
from oscine.extensions.bench.serve.report import columns
from oscine.extensions.bench.serve.row import Row
from oscine.extensions.plan.answer import text
from oscine.extensions.plan.search.answer import Answer, FrontPoint
from oscine.extensions.plan.search.rounds import Judged


def write(path: Path, answer: Answer) -> None:
    """Raises OSError."""
    question = answer.found.question
    front = [_row(question.model, "Pareto front", point) for point in answer.front]
    peers = [_row(question.model, str(point.layout), point) for point in answer.sweep]
    best = answer.best.whole[0].row | {"framework": f"best: {answer.best.candidate}", "hw": "unknown"}
    found = pictures(lambda size: pareto.draw(front, [*peers, best], 1, size))
    tables = [
        Table("The answer", ("what", "value"), list(text.lines(answer))),
        Table("Simulated", ("candidate", *columns(1)), _simulated(answer)),
        Table("Pareto front, estimated", text.FRONT, list(text.front_lines(answer))),
    ]
    rows = [trial.row for one in answer.found.finals for trial in one.whole if trial.row]
    write_page(path, f"A plan for {question.model}", text.title(question), found, tables, rows)


def _row(model: str, name: str, point: FrontPoint) -> Row:
    speeds = {"median_intvty": point.tok_s_user, "output_tput_per_gpu": point.tok_s_gpu}
    return {"model": model, "framework": name, "conc": point.rows, **speeds}


def _simulated(answer: Answer) -> list[tuple[str, ...]]:
    def name(one: Judged, how: str) -> str:
        return f"{one.candidate}; {one.candidate.limits}; {how}"

    whole = [
        (name(one, f"seed {seed}"), *trial.cells)
        for one in answer.found.finals
        for seed, trial in enumerate(one.whole)
        if trial.cells
    ]
    short = [(name(one, "short"), *one.short.cells) for one in answer.found.tried if one.short and one.short.cells]
    return whole + short
