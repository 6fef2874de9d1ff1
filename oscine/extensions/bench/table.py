"""`python -m oscine.extensions.bench.table`: the table of docs/results.md, in Markdown, vLLM's figures in brackets."""

import argparse
from collections.abc import Iterable, Iterator, Sequence

from oscine.extensions.bench import anchors
from oscine.extensions.bench.result import Result, latest, of_one_gpu, parse_results

COLUMNS = (
    *("model", "requests", "prompt/generated", "output tok/s", "tok/s/user", "decode step", "of roofline"),
    "prefill tok/s",
)
ENERGY = ("J/output token", "watts")  # where a result has them


def lines(results: Iterable[Result]) -> Iterator[str]:
    """The last result of each model and point on one GPU, the larger model first, then by load."""
    newest = latest(of_one_gpu(results)).values()
    counted = any(result.watts is not None for result in newest)
    columns = (*COLUMNS, *ENERGY) if counted else COLUMNS
    yield _line(columns)
    yield f"|{'---|' * len(columns)}"
    for result in sorted(newest, key=lambda r: (-len(r.model), r.model, r.concurrency, r.isl, r.osl)):
        yield _line((*_cells(result), *_energy(result)) if counted else _cells(result))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _energy(result: Result) -> tuple[str, ...]:
    if result.joules_per_output_token is None or result.watts is None:
        return "", ""
    return f"{result.joules_per_output_token:.3g}", _number(result.watts)


def _cells(result: Result) -> tuple[str, ...]:
    peer = anchors.vllm(result.model, result.point)
    share = "" if result.roofline_share is None else f"{result.roofline_share:.0%}"
    return (
        result.model,
        str(result.concurrency),
        f"{result.isl}/{result.osl}",
        _beside(result.output_tok_s, peer.output_tok_s),
        _beside(result.tok_s_user, peer.tok_s_user),
        f"{result.decode_step_ms:.2f} ms",
        share,
        _beside(result.prefill_tok_s, anchors.vllm_prefill(result.model, result.point)),
    )


def _beside(ours: float, theirs: float | None) -> str:
    return _number(ours) if theirs is None else f"{_number(ours)} ({_number(theirs)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}".removesuffix(".0")


def main(argv: Sequence[str] | None = None) -> None:
    _, results = parse_results(argparse.ArgumentParser(prog="python -m oscine.extensions.bench.table"), argv)
    print("\n".join(lines(results)))


if __name__ == "__main__":
    main()
