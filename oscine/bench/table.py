"""`python -m oscine.bench.table`: the table of docs/results.md, in Markdown, vLLM's figures in brackets."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from oscine.bench import anchors
from oscine.bench.result import RESULTS, Result, latest, read

HEADER = (
    "| model | requests | prompt/generated | output tok/s | tok/s/user | decode step | of roofline | prefill tok/s |",
    "|---|---|---|---|---|---|---|---|",
)


def lines(results: Iterable[Result]) -> Iterator[str]:
    """The last result of each model and point, the larger model first, then by load."""
    yield from HEADER
    newest = latest(results).values()
    for result in sorted(newest, key=lambda r: (-len(r.model), r.model, r.concurrency, r.isl, r.osl)):
        yield _row(result)


def _row(result: Result) -> str:
    peer = anchors.vllm(result.model, result.concurrency, result.isl, result.osl)
    prefill = anchors.vllm_prefill(result.model, result.concurrency, result.isl)
    share = "" if result.roofline_share is None else f"{result.roofline_share:.0%}"
    cells = (
        result.model,
        str(result.concurrency),
        f"{result.isl}/{result.osl}",
        _beside(result.output_tok_s, None if peer is None else peer.output_tok_s),
        _beside(result.tok_s_user, None if peer is None else peer.tok_s_user),
        f"{result.decode_step_ms:.2f} ms",
        share,
        _beside(result.prefill_tok_s, prefill),
    )
    return f"| {' | '.join(cells)} |"


def _beside(ours: float, theirs: float | None) -> str:
    return _number(ours) if theirs is None else f"{_number(ours)} ({_number(theirs)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}".removesuffix(".0")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m oscine.bench.table")
    parser.add_argument(
        "results", nargs="*", type=Path, default=[RESULTS], help=f"files of results (default: {RESULTS})"
    )
    args = parser.parse_args(argv)
    try:
        results = [result for path in args.results for result in read(path)]
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print("\n".join(lines(results)))


if __name__ == "__main__":
    main()
