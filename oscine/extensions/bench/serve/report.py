"""A measured point as text: the report of `bench serve`, and a row of the table of `bench sweep`."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from oscine.extensions.bench.serve.arrival import Arrival
from oscine.extensions.bench.serve.measure import Measures
from oscine.extensions.bench.serve.run import Measured

_BUSY = 0.9  # a client process above this share of a core may have been the limit
_LATE_S = 0.05

_PER_GPU = "per GPU"
COLUMNS = (
    "load",
    "done",
    "failed",
    "req/s",
    "out tok/s",
    _PER_GPU,
    "tok/s/user",
    "TTFT ms",
    "p99",
    "TPOT ms",
    "p99",
    "goodput",
    "J/token",
)


def columns(gpus: int | None) -> tuple[str, ...]:
    """`gpus`: of the server; None: figures are the whole server's."""
    return tuple(name for name in COLUMNS if gpus or name != _PER_GPU)


def load_text(arrival: Arrival) -> str:
    if arrival.rate is None:
        return f"{arrival.concurrency:,} at once"
    if arrival.times_s:
        return f"at the times of the trace, {arrival.rate:.3g} per second on average"
    burst = f" in bursts of {arrival.burst}" if arrival.burst > 1 else ""
    return f"{arrival.rate:g} per second{burst}"


def page(measured: Measured, gpus: int | None) -> Iterator[str]:
    """The lines of the report. Times are in milliseconds."""
    found = measured.measures
    yield _line("requests", f"{found.num_completed:,} completed, {found.num_failed:,} failed")
    if found.num_completed:
        yield _line("duration", f"{found.duration_s:,.2f} s, {found.mean_under_way:,.1f} requests under way on average")
        yield _line("requests/s", f"{found.requests_per_s:,.2f}")
        yield _line("output tokens/s", f"{found.output_tok_s:,.1f}{_per_gpu(found.output_tok_s, gpus)}")
        cached = f", {found.cached_tokens / found.prompt_tokens:.0%} of them cached" if found.cached_tokens else ""
        yield _line("prompt tokens/s", f"{found.prompt_tok_s:,.1f}{_per_gpu(found.prompt_tok_s, gpus)}{cached}")
        yield _line("tokens/s per user", f"{found.tok_s_user:,.1f}, at the median TPOT")
        yield _line("tokens per request", _tokens(found))
        if found.num_good is not None:
            share = found.num_good / found.num_completed
            yield _line("goodput", f"{found.goodput:,.2f} requests/s within the limits ({share:.1%} of the completed)")
        if measured.energy_j:
            yield _line(
                "energy", f"{measured.energy_j:,.0f} J, {measured.energy_j / found.output_tokens:.4g} per token"
            )
        yield ""
        yield from _times(found)
    yield from warnings(measured)


def _line(name: str, text: str) -> str:
    return f"{name:<20} {text}"


def _per_gpu(rate: float, gpus: int | None) -> str:
    return f", {rate / gpus:,.1f} per GPU" if gpus and gpus > 1 else ""


def _tokens(found: Measures) -> str:
    count = found.num_completed
    per_event = found.output_tokens / found.num_events
    prompt, output = found.prompt_tokens / count, found.output_tokens / count
    return f"{prompt:,.1f} of the prompt, {output:,.1f} generated, {per_event:.2f} per event"


def _times(found: Measures) -> Iterator[str]:
    statistics = ("mean", "median", "p90", "p95", "p99")
    yield _line("", "".join(f"{name:>11}" for name in statistics))
    rows = (
        ("first event", found.first_event),
        ("TTFT", found.ttft),
        ("TPOT", found.tpot),
        ("ITL", found.itl),
        ("end to end", found.e2el),
    )
    for name, summary in rows:
        values = asdict(summary)
        yield _line(f"{name}, ms", "".join(f"{1e3 * values[statistic]:>11,.2f}" for statistic in statistics))


def warnings(measured: Measured) -> Iterator[str]:
    found = measured.measures
    for error, count in found.errors.most_common(5):
        yield f"failed {count:,} times: {error}"
    if not found.counted:
        yield "the server counts no tokens: each streamed event counts as one, and prompt tokens are unknown"
    if measured.busy > _BUSY:
        yield f"a client process used {measured.busy:.0%} of a core: it may be the limit; try --processes"
    if found.late.p99 > _LATE_S:
        yield f"requests were sent late: {1e3 * found.late.p99:,.0f} ms at the 99th percentile"


def cells(measured: Measured, gpus: int | None) -> tuple[str, ...]:
    """One cell for each of the columns."""
    found = measured.measures
    times = (found.ttft.median, found.ttft.p99, found.tpot.median, found.tpot.p99)
    return (
        load_text(measured.arrival),
        f"{found.num_completed:,}",
        f"{found.num_failed:,}",
        f"{found.requests_per_s:,.2f}",
        f"{found.output_tok_s:,.1f}",
        *([f"{found.output_tok_s / gpus:,.1f}"] if gpus else ()),
        f"{found.tok_s_user:,.1f}",
        *(f"{1e3 * time_s:,.2f}" for time_s in times),
        "-" if found.goodput is None else f"{found.goodput:,.2f}",
        f"{measured.energy_j / found.output_tokens:.4g}" if measured.energy_j and found.output_tokens else "-",
    )


def table_line(values: Sequence[str]) -> str:
    return f"{values[0]:>16}" + "".join(f"{value:>11}" for value in values[1:])
