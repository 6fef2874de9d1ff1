"""Intervals and tests against published values, enumeration of all cases, and coverage in simulations."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from oscine.extensions.eval.estimates import Z, accuracy, difference, sign_flip_p, wilson


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_published(right: int, count: int, low: float, high: float) -> None:
    """Newcombe, Statistics in Medicine 17 (1998), table I, method 3."""
    found = wilson(right / count, count)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)
    mirrored = wilson(1 - right / count, count)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - found.high, 1 - found.low))


@pytest.mark.parametrize(("share", "count"), [(0.5, 1), (0.9, 10), (0.37, 198)])
def test_the_bounds_of_wilson_are_shares_that_a_score_test_just_accepts(share: float, count: int) -> None:
    found = wilson(share, count)
    for bound in (found.low, found.high):
        assert abs(share - bound) == pytest.approx(Z * math.sqrt(bound * (1 - bound) / count))


def test_one_answer_per_task_is_wilson() -> None:
    assert accuracy([1, 1, 0, 1], 1) == wilson(0.75, 4)


def test_answers_that_only_repeat_the_first_one_add_nothing() -> None:
    """With the unbiased variance of the task means, n equal pairs are n - 1 independent answers."""
    found = accuracy([4, 4, 0, 4, 0, 0, 4], 4)
    assert found == pytest.approx(wilson(4 / 7, 6))


@pytest.mark.parametrize(("rights", "independent"), [([3, 3], 2), ([0, 0, 0], 3), ([1], 1), ([1, 1, 1], 6)])
def test_where_the_variance_says_nothing(rights: list[int], independent: int) -> None:
    samples = 3 if rights[0] == 3 else 2
    assert accuracy(rights, samples) == wilson(sum(rights) / len(rights) / samples, independent)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """40 tasks of a population of tasks with different difficulties, 4 answers each, 600 times."""
    random = np.random.default_rng(1)
    hard = random.beta(2, 1, (600, 40))
    first = random.binomial(4, hard)
    found = [accuracy(rights.tolist(), 4) for rights in first]
    covered = np.mean([one.low <= 2 / 3 <= one.high for one in found])
    assert 0.93 <= covered <= 0.97
    naive = [wilson(rights.mean() / 4, 160) for rights in first]
    assert np.mean([one.low <= 2 / 3 <= one.high for one in naive]) < 0.92, "answers are not independent"


@pytest.mark.parametrize(("samples", "most"), [(1, 0.97), (4, 1.0)])
def test_intervals_of_differences_cover_the_truth(samples: int, most: float) -> None:
    """The second model is better in some tasks: the gain is 4/5 - 2/3. With several answers the interval is wide."""
    random = np.random.default_rng(2)
    hard, other = random.beta(2, 1, (2, 600, 40))  # the larger one of two is beta(4, 1)
    runs = [random.binomial(samples, chance) / samples for chance in (hard, np.maximum(hard, other))]
    found = [difference(zip(a, b, strict=True)) for a, b in zip(*runs, strict=True)]
    assert 0.93 <= np.mean([one.low <= 4 / 5 - 2 / 3 <= one.high for one in found]) <= most


def test_the_difference_is_that_of_bonett_and_price() -> None:
    """One is added to each number of discordant pairs, and two to the number of pairs."""
    only_first, only_second, both, neither = 3, 9, 20, 8
    pairs = [(1, 0)] * only_first + [(0, 1)] * only_second + [(1, 1)] * both + [(0, 0)] * neither
    lost, won, count = (only_first + 1) / 42, (only_second + 1) / 42, 42
    half = Z * math.sqrt((lost + won - (won - lost) ** 2) / count)
    found = difference(pairs)
    assert found.value == pytest.approx(6 / 40)
    assert (found.low, found.high) == pytest.approx((won - lost - half, won - lost + half))
    same = difference([(1, 1)] * 10)
    assert same.value == 0
    assert same.low == pytest.approx(-same.high)
    assert 0.2 < same.high < 0.3, "no change in ten tasks is not no change in all tasks"


def test_a_published_comparison() -> None:
    """Fagerland, Lydersen and Laake, Statistics in Medicine 33 (2014): airway reactivity of 21 children."""
    pairs = [(1, 1)] + [(1, 0)] * 1 + [(0, 1)] * 7 + [(0, 0)] * 12
    found = difference(pairs)
    assert [round(bound, 3) for bound in found] == [0.286, 0.013, 0.508]
    assert round(sign_flip_p(second - first for first, second in pairs), 3) == 0.07


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (0, 1), (1, 8), (5, 5), (6, 2), (40, 61)])
def test_one_answer_per_task_is_mcnemar(lost: int, won: int) -> None:
    """Twice the tail of a binomial distribution, at most 1."""
    tail = sum(math.comb(lost + won, k) for k in range(min(lost, won) + 1))
    expected = min(Fraction(1), Fraction(2 * tail, 2 ** (lost + won)))
    assert sign_flip_p([0, 0, *[-1] * lost, *[1] * won]) == pytest.approx(float(expected))


@pytest.mark.parametrize("gains", [[3, -1, 2, 2, -4, 0, 1], [6, 2, -4, 8, 10], [1, 1, 1, 1, 1, 1, 1, 1], [5], [-3, 3]])
def test_the_sign_flip_test_counts_all_signs(gains: list[int]) -> None:
    signs = itertools.product((-1, 1), repeat=len(gains))
    sums = [abs(sum(sign * gain for sign, gain in zip(chosen, gains, strict=True))) for chosen in signs]
    expected = sum(one >= abs(sum(gains)) for one in sums) / len(sums)
    assert sign_flip_p(gains) == pytest.approx(expected)
