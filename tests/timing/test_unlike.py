"""Steps of unlike contexts, beside a machine whose programs read the contexts."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.timing.features import StepFeatures, features_of, pairs_of
from oscine.timing.kinds import GraphSizes
from oscine.timing.read import check, table_of
from oscine.timing.table import Header, StepPoint
from oscine.types import ScheduledSequence

GRAPHS = GraphSizes(decode=(1, 2, 4, 8, 12, 16, 24, 32, 64))
HEADER = Header("a model", 2, 64, "a GPU", "a machine", decode_graphs=GRAPHS.decode)
SHORT, LONG = 1024, 130_000
PROGRAM, ALL = 1.0, 16.0  # tokens per unit of time that a program reads, and that all of them do
UNIT_MS = 1e-4


def attention_ms(contexts: list[int]) -> float:
    """Each context is divided among as many programs. All that are not done go on, as fast as each alone can or as the
    memory can, whatever is less."""
    splits = -(-24 // GRAPHS.size_of(StepFeatures(len(contexts), sampled=len(contexts))))
    left, units = sorted([context / splits for context in contexts] * splits), 0.0
    while left:
        speed = min(PROGRAM, ALL / len(left))
        units += left[0] / speed
        left = [one - left[0] for one in left if one > left[0]]
    return units * UNIT_MS


def law_ms(contexts: list[int], tokens: int = 0, start: int = 0) -> float:
    rows = GRAPHS.size_of(StepFeatures(len(contexts), sampled=len(contexts))) if not tokens else len(contexts)
    return 2 + 0.1 * rows + 0.01 * tokens + 3e-7 * pairs_of(start, tokens) + attention_ms(contexts)


def point(contexts: list[int], tokens: int = 0, start: int = 0) -> StepPoint:
    rows, longest = len(contexts), max(contexts, default=0)
    assert not rows or sum(contexts) % rows == 0
    mean = sum(contexts) // max(rows, 1)
    kind = "mixed" if rows and tokens else "prompts" if tokens else "decode"
    size = 0 if tokens else GRAPHS.size_of(StepFeatures(rows, sampled=rows))
    more = {"tokens": tokens, "pairs": pairs_of(start, tokens), "sequences": int(tokens > 0)}
    unlike = longest if longest > mean else 0
    sampled = rows + (tokens > 0)
    return StepPoint(
        kind, law_ms(contexts, tokens, start), rows, mean, longest=unlike, sampled=sampled, size=size, **more
    )


def one_long(rows: int, longest: int, short: int = SHORT) -> list[int]:
    """With a whole mean."""
    return [longest - (longest - short) % rows, *[short] * (rows - 1)]


ALIKE = [point([context] * rows) for rows in GRAPHS.decode for context in (SHORT, LONG)]
UNLIKE = [point(one_long(rows, longest)) for rows in (2, 4, 8, 12, 16, 24, 64) for longest in (16_384, LONG)]
PROMPTS = [point([], tokens, start) for tokens in (64, 1024, 4096) for start in (0, 16_384, LONG)]
MIXED = [
    point([context] * rows, total - rows, start)
    for total in (64, 1024, 4096)
    for rows in (1, 8, 32)
    for context, start in ((SHORT, 0), (SHORT, 16_384), (65_536, 0))
]
UNLIKE_MIXED = [point(one_long(rows, LONG), 1024 - rows) for rows in (8, 32)]
ALL_POINTS = (*ALIKE, *UNLIKE, *PROMPTS, *MIXED, *UNLIKE_MIXED)
TABLE, OLD = table_of(HEADER, ALL_POINTS), table_of(HEADER, (*ALIKE, *PROMPTS, *MIXED))
contexts_of_rows = st.lists(st.integers(SHORT, LONG), min_size=2, max_size=64)


def step_of(contexts: list[int], tokens: int = 0, start: int = 0) -> StepFeatures:
    decodes = [ScheduledSequence(i, context - 1, 1, True, []) for i, context in enumerate(contexts)]
    chunk = [ScheduledSequence(len(contexts), start, tokens, True, [])] if tokens else []
    return features_of(decodes + chunk)


def test_times_at_points_are_exact() -> None:
    for points in (ALIKE, UNLIKE, MIXED, UNLIKE_MIXED):
        found = check(TABLE, points)
        assert found.not_measured == 0
        assert found.worst < 1e-9
    assert check(OLD, UNLIKE).worst > 0.25, "the points say nothing that others do not"


@settings(derandomize=True, deadline=None)
@given(st.sampled_from([2, 4, 8, 12, 16, 24, 64]), st.integers(1, 6), st.integers(SHORT, LONG), st.integers(0, 8192))
def test_some_long_contexts_among_short_ones(rows: int, many: int, longest: int, more: int) -> None:
    contexts = [longest] * min(many, rows) + [min(SHORT + more, longest)] * max(0, rows - many)
    assert TABLE.step_s(step_of(contexts)) * 1e3 == pytest.approx(law_ms(contexts), rel=0.25)


@pytest.mark.parametrize("rows", [2, 3, 4, 7, 8, 12, 15, 16, 24])
def test_contexts_of_a_service(rows: int) -> None:
    """Most are short, some long. Errors are less than half of those without points of unlike contexts."""
    random, errors = Random(rows), {TABLE: 0.0, OLD: 0.0}
    for _ in range(50):
        contexts = [round(min(LONG, max(SHORT, random.lognormvariate(9.2, 1.0)))) for _ in range(rows)]
        for table in errors:
            errors[table] += abs(table.step_s(step_of(contexts)) * 1e3 / law_ms(contexts) - 1) / 50
    assert errors[TABLE] < 0.05
    assert errors[TABLE] < errors[OLD] / 2


@settings(derandomize=True, deadline=None)
@given(st.sampled_from([4, 8, 12, 16, 24]), st.integers(32_768, LONG), st.integers(100, 20_000))
def test_contexts_that_are_spread_evenly(rows: int, longest: int, mean: int) -> None:
    """One is long, the others go from nothing to twice their mean."""
    contexts = [longest, *(max(1, round(2 * mean * (i + 0.5) / (rows - 1))) for i in range(rows - 1))]
    if max(contexts) == longest:
        assert TABLE.step_s(step_of(contexts)) * 1e3 == pytest.approx(law_ms(contexts), rel=0.04)


@settings(derandomize=True, deadline=None)
@given(contexts_of_rows, st.integers(0, 10_000), st.sampled_from([0, 64, 2000]))
def test_a_longer_context_never_takes_less_and_equal_ones_are_the_bound(
    contexts: list[int], more: int, tokens: int
) -> None:
    step_s = TABLE.step_s(step_of(contexts, tokens))
    longer = sorted(contexts)
    longer[-1] = min(LONG, longer[-1] + more)
    assert step_s <= TABLE.step_s(step_of(longer, tokens)) + 1e-12
    assert OLD.step_s(step_of(contexts, tokens)) <= step_s + 1e-12


@settings(derandomize=True, deadline=None)
@given(contexts_of_rows)
def test_a_cell_holds_while_all_contexts_grow_alike(contexts: list[int]) -> None:
    cell, rows = TABLE.cell(step_of(contexts)), len(contexts)
    for more in (0, 1, 500):
        later = step_of([context + more for context in contexts])
        if later.decode_context <= cell.last_context and later.longest <= LONG:
            assert cell.step_s(later.decode_context) == pytest.approx(TABLE.step_s(later), rel=1e-9), rows


@settings(derandomize=True, deadline=None)
@given(st.sampled_from([1, 8, 32]), st.integers(512, 4096), st.integers(16_384, LONG), st.booleans())
def test_mixed_steps_deep_in_a_prompt_grow_as_prompts_do(rows: int, total: int, start: int, unlike: bool) -> None:
    contexts, tokens = one_long(rows, LONG if unlike else SHORT), total - rows
    cell = TABLE.cell(step_of(contexts, tokens, start))
    assert (cell.figures, cell.factor) == ("composed", 1.0) if start > 16_384 else cell.factor == 1.0
    assert cell.step_s(sum(contexts)) * 1e3 == pytest.approx(law_ms(contexts, tokens, start), rel=0.08)


def test_a_measurement_that_makes_no_sense_is_bounded() -> None:
    """One long context takes no less than the mean, and no more than as many long ones."""
    for ms, bound in ((0.1, [SHORT + (LONG - SHORT) // 8] * 8), (1e4, [LONG] * 8)):
        wrong = replace(point(one_long(8, LONG)), ms=ms)
        found = table_of(HEADER, (*ALIKE, wrong)).step_s(wrong.features)
        assert found * 1e3 == pytest.approx(law_ms(bound), rel=0.02)


def test_tables_say_whether_they_know_unlike_contexts() -> None:
    assert TABLE.has_unlike
    assert not OLD.has_unlike
    held = [replace(one, held_out=True) for one in UNLIKE]
    assert not table_of(HEADER, (*ALIKE, *held)).has_unlike
    assert table_of(HEADER, (*ALIKE, *held)).step_s(UNLIKE[0].features) == OLD.step_s(UNLIKE[0].features)
