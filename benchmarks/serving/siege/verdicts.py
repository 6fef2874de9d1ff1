"""Judges what an attack left behind, from numbers. Each function returns what is wrong, in a sentence, or None."""

from collections.abc import Mapping

QUIET_S = 0.05  # the longest gap of streams on a quiet machine without attacks


def allowed_gap_s(limit_s: float, floor_s: float) -> float:
    """The longest gap that an attack may cause: on a machine that is not quiet, so much above its floor."""
    return limit_s if floor_s <= QUIET_S else floor_s + limit_s


def gap_fault(gap_s: float, allowed_s: float) -> str | None:
    if gap_s <= allowed_s:
        return None
    return f"a healthy stream stood still for {1e3 * gap_s:.0f} ms, more than {1e3 * allowed_s:.0f}"


def lag_fault(before: Mapping[float, float], after: Mapping[float, float], allowed_s: float) -> str | None:
    """`before` and `after`: the number of measurements up to each bound in seconds, the last of which is infinite."""
    bound_s = min(bound for bound in after if bound >= allowed_s)
    total_s = max(after)
    late = (after[total_s] - before[total_s]) - (after[bound_s] - before[bound_s])
    return f"the event loop was late by more than {1e3 * bound_s:.0f} ms, {late:.0f} times" if late else None


def memory_fault(peak_bytes: int, kept_bytes: int, max_peak_bytes: int, max_kept_bytes: int) -> str | None:
    """Both figures are above the memory at rest: the peak, and what is kept after the attack."""
    if peak_bytes > max_peak_bytes:
        return f"memory rose by {peak_bytes >> 20} MiB, more than {max_peak_bytes >> 20}"
    if kept_bytes > max_kept_bytes:
        return f"{kept_bytes >> 20} MiB of memory are kept, more than {max_kept_bytes >> 20}"
    return None


def files_fault(before: Mapping[str, object], after: Mapping[str, object]) -> str | None:
    """`before` and `after`: what is known of each file outside the server's folders."""
    changed = [path for path in sorted({*before, *after}) if before.get(path) != after.get(path)]
    return f"files outside the server's folders have changed: {', '.join(changed[:5])}" if changed else None


def quota_fault(what: str, used: int, limit: int) -> str | None:
    return f"{what}: {used} where {limit} are allowed" if used > limit else None


def status_fault(statuses: Mapping[str, int], expected: str) -> str | None:
    """Every answer must have the expected status."""
    others = {status: number for status, number in statuses.items() if status != expected}
    return f"answers are not all {expected}: {others}" if others or not statuses else None
