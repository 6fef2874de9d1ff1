"""Results as lines of a terminal table, beside the figures of vLLM and of an earlier run."""

from collections.abc import Mapping

from oscine.extensions.bench import anchors
from oscine.extensions.bench.result import Key, Result

HEADER = (
    f"{'model':>12} {'c':>5} {'isl/osl':>11} {'out tok/s':>10} {'vLLM':>7} {'x':>5} "
    f"{'prefill':>8} {'vLLM':>7} {'x':>5} {'step ms':>8} {'tok/s/user':>10} {'vLLM':>6} {'x':>5} {'roofline':>8} "
    f"{'J/token':>8} {'watts':>7} {'first ms':>8}"
)


def line(result: Result, baseline: Mapping[Key, Result] | None = None) -> str:
    """`baseline`: earlier results; the ratios of output tok/s and tok/s/user to them are appended."""
    point = result.point
    peer, prefill = anchors.vllm(result.model, point), anchors.vllm_prefill(result.model, point)
    share = "-" if result.roofline_share is None else f"{result.roofline_share:.1%}"
    text = (
        f"{result.model:>12} {point.concurrency:>5} {f'{point.isl}/{point.osl}':>11} "
        f"{result.output_tok_s:>10,.0f} {_beside(result.output_tok_s, peer.output_tok_s, 7)} "
        f"{result.prefill_tok_s:>8,.0f} {_beside(result.prefill_tok_s, prefill, 7)} {result.decode_step_ms:>8.3f} "
        f"{result.tok_s_user:>10,.1f} {_beside(result.tok_s_user, peer.tok_s_user, 6)} {share:>8} "
        f"{_or_dash(result.joules_per_output_token, '.4g'):>8} {_or_dash(result.watts, ',.0f'):>7} "
        f"{_or_dash(result.first_token_ms, ',.1f'):>8}"
    )
    if baseline is None:
        return text
    earlier = baseline.get(result.key)
    return text + ("  before: none" if earlier is None else f"  before: {_ratios(result, earlier)}")


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _beside(ours: float, theirs: float | None, width: int) -> str:
    """The peer's figure and ours as a multiple of it."""
    if theirs is None:
        return f"{'-':>{width}} {'-':>5}"
    return f"{theirs:>{width},.0f} {ours / theirs:>5.2f}"


def _ratios(result: Result, earlier: Result) -> str:
    output, user = result.output_tok_s / earlier.output_tok_s, result.tok_s_user / earlier.tok_s_user
    return f"out x{output:.3f}, user x{user:.3f} ({earlier.commit})"
