"""Runs and their comparison as text."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from oscine.extensions.eval import estimates
from oscine.extensions.eval.compare import Comparison, tally
from oscine.extensions.eval.estimates import Estimate
from oscine.extensions.eval.results import Row

ALL = "all"
_HEADER = ("tasks", "answers", "accuracy", "95 % interval", "tokens", "truncated", "unreadable", "errors")
_WIDTHS = (7, 9, 10, 19, 9, 11, 12, 8)


def table(rows: Sequence[Row], samples: int) -> Iterator[str]:
    """A line per group of tasks, and one for all. Every task has `samples` rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    lines = [*groups.items(), (ALL, [*rows])] if len(groups) > 1 else [(ALL, [*rows])]
    width = max(len(name) for name, _ in lines)
    yield _line("", _HEADER, width)
    for name, found in lines:
        yield _line(name, _cells(found, samples), width)


def _cells(rows: Sequence[Row], samples: int) -> tuple[str, ...]:
    tallies = tally(rows)
    found = estimates.accuracy([one.right for one in tallies.values()], samples)
    tokens = [row.output_tokens for row in rows if row.output_tokens is not None]
    answered = [row for row in rows if not row.error]
    return (
        f"{len(tallies):,}",
        f"{len(answered):,}",
        f"{found.value:.1%}",
        f"{found.low:.1%} to {found.high:.1%}",
        f"{fmean(tokens):,.0f}" if tokens else "-",
        f"{sum(row.finish_reason == 'length' for row in answered):,}",
        f"{sum(row.found is None for row in answered):,}",
        f"{len(rows) - len(answered):,}",
    )


def _line(name: str, cells: Iterable[str], width: int) -> str:
    return f"{name:<{width}}" + "".join(f"{cell:>{size}}" for cell, size in zip(cells, _WIDTHS, strict=True))


def errors(rows: Iterable[Row]) -> Iterator[str]:
    for error, count in Counter(row.error for row in rows if row.error).most_common(5):
        yield f"failed {count:,} times: {error}"


def comparison(found: Comparison, names: tuple[str, str]) -> Iterator[str]:
    """`names` of the first run and of the second one."""
    first, second = names
    test = "McNemar's exact test" if found.is_single else "exact sign-flip test over tasks"
    gain: Estimate = found.difference
    changed = found.changed()
    won = sum(b.right * a.samples > a.right * b.samples for _, a, b in changed)
    yield f"{second} minus {first}, {len(found.first):,} tasks:"
    yield f"  difference {gain.value:+.1%}, 95 % interval {gain.low:+.1%} to {gain.high:+.1%}"
    yield f"  p = {found.p:.3g} ({test}); better tasks: {won:,}, worse: {len(changed) - won:,}"
    for name, count in ((first, found.num_only_first), (second, found.num_only_second)):
        if count:
            yield f"  tasks only in {name}, which are left out: {count:,}"
    if changed:
        yield "  right answers in the tasks that changed:"
        width = max(len(task) for task, _, _ in changed)
        yield from (f"    {task:<{width}}  {a} -> {b}" for task, a, b in changed)
