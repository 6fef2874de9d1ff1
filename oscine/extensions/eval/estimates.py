"""Confidence intervals of accuracies, and the test of a paired difference. docs/eval.md has formulas and sources."""

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist, fmean, variance
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


class Estimate(NamedTuple):
    value: float
    low: float
    high: float


def wilson(share: float, count: float) -> Estimate:
    """Wilson's score interval of a share of `count` independent trials."""
    z2 = Z * Z
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    low = 0.0 if share == 0 else middle - half  # exactly, whatever the rounding
    return Estimate(share, low, 1.0 if share == 1 else middle + half)


def accuracy(rights: Sequence[int], samples: int) -> Estimate:
    """The accuracy over tasks, each with `samples` answers, of which `rights` are right.

    Answers to one task are not independent. Wilson's interval gets the number of independent answers that would have
    the variance of the task means.
    """
    shares = [right / samples for right in rights]
    return wilson(fmean(shares), _independent(shares, samples))


def _independent(shares: Sequence[float], samples: int) -> float:
    num_tasks, share = len(shares), fmean(shares)
    if samples == 1 or num_tasks == 1 or share in (0.0, 1.0):
        return num_tasks
    spread = variance(shares) / num_tasks
    most = float(num_tasks * samples)
    return min(share * (1 - share) / spread, most) if spread else most


def difference(pairs: Iterable[tuple[float, float]]) -> Estimate:
    """The mean of second minus first over tasks, with the interval of Bonett and Price.

    It is Wald's interval with two more tasks, one won and one lost; `value` is without them. For several answers per
    task that is wider than it must be.
    """
    gains = [second - first for first, second in pairs]
    count = len(gains) + 2
    middle = math.fsum(gains) / count
    spread = (math.fsum(gain * gain for gain in gains) + 2) / count - middle * middle
    half = Z * math.sqrt(spread / count)
    return Estimate(fmean(gains), max(middle - half, -1.0), min(middle + half, 1.0))


def sign_flip_p(gains: Iterable[int]) -> float:
    """Two-sided p value of a sum of paired differences, if each could as well have had the other sign.

    Exact: the distribution of the sum is computed. With differences of -1, 0 and 1 it is McNemar's exact test.
    """
    given = [*gains]
    sizes = [abs(gain) for gain in given if gain]
    unit = math.gcd(*sizes)
    if not unit:
        return 1.0
    # chances[i]: that the differences with a positive sign sum to i units; the sum is then 2 i - total
    total = sum(sizes) // unit
    chances = np.zeros(total + 1)
    chances[0], reach = 1.0, 0
    for size in (size // unit for size in sizes):
        chances[size : reach + size + 1] += chances[: reach + 1].copy()
        chances[: reach + size + 1] /= 2
        reach += size
    observed = abs(sum(given)) // unit
    least = (total + observed) // 2  # the same parity
    return min(1.0, 2 * float(chances[least:].sum())) if observed else 1.0
