"""Tables of step times, made from a known law: what they answer at points, between them and beyond."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oscine.timing.answer import NotMeasuredError
from oscine.timing.features import StepFeatures, features_of, pairs_of
from oscine.timing.kinds import EAGER, GraphSizes
from oscine.timing.read import check, read_table, table_of
from oscine.timing.table import Header, StepPoint, write_table
from oscine.types import ScheduledSequence

GRAPHS = GraphSizes(decode=(1, 2, 4, 8, 16, 32, 64), prompts=(32, 64, 128, 256), room=64)
HEADER = Header("a model", 2, 64, "a GPU", "a law", decode_graphs=GRAPHS.decode, prompt_graphs=GRAPHS.prompts)
CONTEXTS = 128, 1024, 4096


def law_ms(step: StepFeatures) -> float:
    """A step of a machine with dearer eager steps, on which rows that fill up a graph take less time than others."""
    size, full = GRAPHS.size_of(step), step.tokens
    part = 0.85 * full * full / (full * full + 1024)  # 0.05 of a row beside 8 others, 0.43 beside 32, 0.82 beside 160
    tokens, host = (full + part * (size - full), 0.0) if size else (full, 0.5)
    rows = tokens if size and not step.prompt_sequences else step.decode_rows
    context = rows * step.decode_context / step.decode_rows if rows else 0.0
    return 1.0 + host + 0.02 * tokens**0.8 + 2e-5 * context + 1e-6 * step.prompt_pairs


def point(rows: int, context: int, tokens: int = 0, start: int = 0, drafts: int = 0) -> StepPoint:
    pairs, chunks = (pairs_of(start, tokens), 1) if tokens else (0, 0)
    step = StepFeatures(rows, rows * context, tokens, pairs, chunks, rows - drafts + chunks, drafts)
    kind = "mixed" if rows and tokens else "prompts" if tokens else "verify" if drafts else "decode"
    return StepPoint(
        kind,
        law_ms(step),
        rows,
        context,
        tokens,
        pairs,
        sequences=chunks,
        sampled=step.sampled,
        drafts=drafts,
        size=GRAPHS.size_of(step),
    )


DECODES = [point(rows, context) for rows in GRAPHS.decode for context in CONTEXTS]
VERIFIES = [
    point(rows * (1 + k), context, drafts=rows * k)
    for k in (1, 3, 4)  # with 4, rows fill up no graph
    for rows in (1, 2, 4, 12, 16)
    for context in CONTEXTS
    if rows * (1 + k) <= 64
]
PROMPTS = [point(0, 0, tokens, start) for tokens in (*GRAPHS.prompts, 257, 512, 1024) for start in (0, 2048, 8192)]
MIXED = [
    point(rows, context, total - rows, start)
    for total in (*GRAPHS.prompts, 67, 130, 257, 512, 1024)
    for rows in (1, 8, 24, 63, 65, 128)
    if rows < total - 1
    for context in CONTEXTS
    for start in (0, 4096)
]
TABLE = table_of(HEADER, (*DECODES, *VERIFIES, *PROMPTS, *MIXED))

contexts = st.integers(CONTEXTS[0], CONTEXTS[-1])


@pytest.mark.parametrize("points", [DECODES, VERIFIES, PROMPTS, MIXED], ids=["decode", "verify", "prompts", "mixed"])
def test_times_at_points_are_exact(points: list[StepPoint]) -> None:
    found = check(TABLE, points)
    assert found.not_measured == 0
    assert found.worst < 1e-9


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 64), contexts)
def test_decodes_between_points(rows: int, context: int) -> None:
    step = StepFeatures(rows, rows * context, sampled=rows)
    assert TABLE.step_s(step) * 1e3 == pytest.approx(law_ms(step), rel=0.03)


@settings(derandomize=True, deadline=None)
@given(st.integers(GRAPHS.prompts[0], 1024), st.integers(0, 8192))
@example(129, 8148)  # the worst: just above one size, far below the next
def test_prompts_between_points(tokens: int, start: int) -> None:
    step = StepFeatures(prompt_tokens=tokens, prompt_pairs=pairs_of(start, tokens), prompt_sequences=1, sampled=1)
    if step.prompt_pairs / max(GRAPHS.size_of(step), tokens) <= 8192:
        assert TABLE.step_s(step) * 1e3 == pytest.approx(law_ms(step), rel=0.24)  # sizes are far apart


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 128), st.integers(2, 800), contexts, st.integers(0, 4096))
def test_mixed_steps_between_points(rows: int, tokens: int, context: int, start: int) -> None:
    step = StepFeatures(rows, rows * context, tokens, pairs_of(start, tokens), 1, rows + 1)
    if step.tokens >= GRAPHS.prompts[0]:
        try:
            found_s = TABLE.step_s(step)
        except NotMeasuredError:  # more pairs per token than the points have
            return
        assert found_s * 1e3 == pytest.approx(law_ms(step), rel=0.15)


def test_mixed_steps_beyond_their_points_grow_as_prompts_and_decodes_do() -> None:
    known = [one for one in MIXED if one.rows + one.tokens <= 64 and one.context <= 1024]
    table = table_of(HEADER, (*DECODES, *PROMPTS, *known))
    for rows, tokens, context in ((8, 56, 4096), (8, 248, 1024), (24, 232, 4096)):
        step = StepFeatures(rows, rows * context, tokens, pairs_of(0, tokens), 1, rows + 1)
        cell = table.cell(step)
        assert (cell.figures, cell.factor) == ("composed", 1.0)
        assert cell.step_s(step.decode_context) * 1e3 == pytest.approx(law_ms(step), rel=0.05)
    with pytest.raises(NotMeasuredError, match=r"2\.00 times"):
        table.cell(StepFeatures(8, 8 * 8192, 56, pairs_of(0, 56), 1, 9))


@settings(derandomize=True, deadline=None)
@given(st.sampled_from([1, 8, 24]), st.integers(257, 1024), st.integers(4097, 8192))
def test_mixed_steps_deep_in_a_prompt_grow_as_prompts_do(rows: int, total: int, start: int) -> None:
    step = StepFeatures(rows, rows * 1024, total - rows, pairs_of(start, total - rows), 1, rows + 1)
    cell = TABLE.cell(step)
    assert (cell.figures, cell.factor) == ("composed", 1.0)
    assert cell.step_s(step.decode_context) * 1e3 == pytest.approx(law_ms(step), rel=0.08)


@pytest.mark.parametrize("total", [64, 256, 300, 512])
def test_eager_mixed_steps_below_their_points_take_less_as_prompts_do(total: int) -> None:
    sizes = GraphSizes(decode=GRAPHS.decode)
    prompts = [replace(point(0, 0, tokens), ms=1 + tokens / 100, size=EAGER) for tokens in (16, 64, 256, 1024)]
    mixed = [replace(point(8, 1024, 1016, start), ms=13.0 + start / 1024, size=EAGER) for start in (0, 1024)]
    table = table_of(replace(HEADER, prompt_graphs=sizes.prompts), (*DECODES, *prompts, *mixed))
    cell = table.cell(StepFeatures(8, 8 * 1024, total - 8, pairs_of(0, total - 8), 1, 9))
    assert (cell.figures, cell.factor) == ("composed", 1.0)
    assert cell.step_s(8 * 1024) * 1e3 == pytest.approx(13 * (1 + total / 100) / 11.24, rel=1e-6)


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 4), st.integers(1, 508))
def test_no_mixed_step_takes_less_than_nothing(rows: int, tokens: int) -> None:
    """Of a slow machine without graphs, of which few steps are known."""
    decodes = [replace(point(n, 1024), ms=ms, size=EAGER) for n, ms in ((1, 25.0), (8, 60.0))]
    prompts = [replace(point(0, 0, n), ms=ms, size=EAGER) for n, ms in ((8, 60.0), (64, 300.0), (512, 2300.0))]
    mixed = replace(point(4, 1024, 508), ms=2100.0, size=EAGER)
    table = table_of(replace(HEADER, decode_graphs=(), prompt_graphs=()), (*decodes, *prompts, mixed))
    step_s = table.step_s(StepFeatures(rows, rows * 1024, tokens, pairs_of(0, tokens), 1, rows + 1))
    assert 0.05 <= step_s <= 2.4


def test_a_prompt_that_took_too_long_moves_no_mixed_step_beyond_its_neighbours() -> None:
    prompts = [replace(point(0, 0, tokens), ms=ms) for tokens, ms in ((32, 5.0), (64, 5.4), (128, 5.01))]
    mixed = [replace(point(8, 1024, total - 8), ms=ms) for total, ms in ((32, 6.0), (128, 7.0))]
    table = table_of(HEADER, (*DECODES, *prompts, *mixed))
    for total in (40, 48, 64, 65, 100):
        step = StepFeatures(8, 8 * 1024, total - 8, pairs_of(0, total - 8), 1, 9)
        assert 6.0 <= table.step_s(step) * 1e3 <= 7.0


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 64), st.integers(0, 3), contexts)
def test_drafts_between_points(sequences: int, drafts: int, context: int) -> None:
    rows = sequences * (1 + drafts)
    step = StepFeatures(rows, rows * context, sampled=sequences, drafts=sequences * drafts)
    if rows <= (64 if drafts == 3 else 32 if drafts else 64):
        assert TABLE.step_s(step) * 1e3 == pytest.approx(law_ms(step), rel=0.25)


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 64), st.integers(1, CONTEXTS[-1]), st.integers(0, 100))
def test_more_context_never_takes_less(rows: int, context: int, more: int) -> None:
    def took_s(one: int) -> float:
        return TABLE.step_s(StepFeatures(rows, one, sampled=rows))

    least = rows * context
    assert took_s(least) <= took_s(min(least + more, rows * CONTEXTS[-1])) + 1e-15


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 63), st.integers(1, CONTEXTS[-1]))
def test_more_rows_never_take_less(rows: int, context: int) -> None:
    first, second = (TABLE.step_s(StepFeatures(n, n * context, sampled=n)) for n in (rows, rows + 1))
    assert first <= second + 1e-12


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 64), contexts, st.sampled_from([0, 40, 400]))
def test_a_cell_is_linear_up_to_its_last_context(rows: int, context: int, tokens: int) -> None:
    chunk = (tokens, pairs_of(0, tokens), 1, rows + 1) if tokens else (0, 0, 0, rows)
    step = StepFeatures(rows, rows * context, *chunk)
    cell = TABLE.cell(step)
    assert cell.last_context >= step.decode_context
    for there in (step.decode_context, (step.decode_context + cell.last_context) // 2, cell.last_context):
        at = step._replace(decode_context=there)
        assert TABLE.step_s(at) == pytest.approx(cell.step_s(there), rel=1e-9)


def test_beyond_the_points_it_refuses_or_says_how_far() -> None:
    far = StepFeatures(64, 64 * 16384, sampled=64)
    with pytest.raises(NotMeasuredError, match=r"4\.00 times"):
        TABLE.step_s(far)
    cell = table_of(HEADER, TABLE.points, scaled=True).cell(far)
    assert (cell.figures, cell.factor) == ("scaled", 4.0)
    assert cell.step_s(far.decode_context) * 1e3 == pytest.approx(law_ms(far))
    longer = StepFeatures(prompt_tokens=4096, prompt_pairs=pairs_of(0, 4096), prompt_sequences=1)
    assert table_of(HEADER, TABLE.points, scaled=True).cell(longer).factor == 4.0
    with pytest.raises(NotMeasuredError, match="no mixed steps"):
        table_of(HEADER, tuple(DECODES)).step_s(StepFeatures(1, 100, 50, 1275, 1, 2))


def test_answers_say_whether_they_were_measured() -> None:
    assert TABLE.cell(StepFeatures(8, 8 * 1024, sampled=8)).figures == "measured"
    assert TABLE.cell(StepFeatures(8, 8 * 1025, sampled=8)).figures == "interpolated"


def test_drafts_that_were_measured_at_one_context_grow_as_decodes_do() -> None:
    table = table_of(HEADER, (*DECODES, point(8, 10, drafts=4)))
    step = StepFeatures(8, 8 * 4096, sampled=4, drafts=4)
    assert table.step_s(step) * 1e3 == pytest.approx(law_ms(step), rel=0.02)


@pytest.mark.parametrize("drafts", [1, 5, 16])
def test_sequences_with_and_without_a_draft_are_between_those_of_both_kinds(drafts: int) -> None:
    """Though so many rows that are no drafts were not measured."""
    few = [one for one in (*DECODES, *VERIFIES) if one.rows <= 16 or one.drafts]
    table, context = table_of(HEADER, few), 1024
    none, all_ = (table.step_s(StepFeatures(16 + n, (16 + n) * context, sampled=16, drafts=n)) for n in (0, 16))
    found_s = table.step_s(StepFeatures(16 + drafts, (16 + drafts) * context, sampled=16, drafts=drafts))
    assert found_s == pytest.approx(none + (all_ - none) * drafts / 16)


def test_drafts_beside_prompts_may_be_more_rows_than_were_measured() -> None:
    known = [one for one in MIXED if one.rows <= 24]
    step = StepFeatures(96, 96 * 1024, 416, pairs_of(0, 416), 1, sampled=25, drafts=72)
    cell = table_of(HEADER, (*DECODES, *PROMPTS, *known)).cell(step)
    assert (cell.figures, cell.factor) == ("composed", 1.0)
    assert cell.step_s(step.decode_context) * 1e3 == pytest.approx(law_ms(step), rel=0.05)
    with pytest.raises(NotMeasuredError, match=r"4\.00 times"):
        table_of(HEADER, (*DECODES, *PROMPTS, *known)).cell(step._replace(sampled=97, drafts=0))


def test_held_out_points_are_not_used(tmp_path: Path) -> None:
    wrong = replace(point(8, 2048), ms=1000.0, held_out=True)
    write_table(tmp_path / "steps.jsonl", HEADER, (*DECODES, wrong))
    table = read_table(tmp_path / "steps.jsonl")
    assert table.header == replace(HEADER, decode_graphs=[*GRAPHS.decode], prompt_graphs=[*GRAPHS.prompts])
    assert table.points == (*DECODES, wrong)
    assert check(table, [wrong]).worst > 0.9
    assert check(table, DECODES).worst < 1e-9


def test_features_of_a_plan() -> None:
    decode, chunk = ScheduledSequence(0, 99, 1, True, [], 2), ScheduledSequence(1, 10, 3, False, [])
    assert features_of([decode, chunk]) == StepFeatures(3, 303, 3, 36, 1, 1, 2)
    assert features_of([decode], [0]) == StepFeatures(1, 100, sampled=1)
    assert not features_of([decode._replace(sample=False)]).is_decode


@pytest.mark.parametrize("rows", [2, 5, 12, 40])
def test_between_few_and_many_rows_contexts_count_by_their_sum(rows: int) -> None:
    """Also in mixed steps, and far from the measured numbers of rows. Few rows may have longer contexts than many."""
    decodes = [point(size, context) for size in (1, 64) for context in (128, 4096)]
    mixed = [point(size, context, 1024 - size, 0) for size, context in ((1, 128), (1, 65_536), (64, 128), (64, 4096))]
    table = table_of(replace(HEADER, decode_graphs=(), prompt_graphs=()), (*decodes, *PROMPTS, *mixed))
    for tokens in (0, 1024 - rows):
        short, long = (
            StepFeatures(rows, rows * context, tokens, pairs_of(0, tokens), tokens // (tokens or 1), rows)
            for context in (128, 4096)
        )
        more_ms = (table.step_s(long) - table.step_s(short)) * 1e3
        assert more_ms == pytest.approx(2e-5 * rows * (4096 - 128), rel=0.02)
    longer = StepFeatures(rows, rows * (8192 if rows < 40 else 5000), tokens, pairs_of(0, tokens), 1, rows)
    assert table.cell(longer).factor == 1.0


def test_few_tokens_are_between_points_in_logarithms_and_many_are_not() -> None:
    """With few tokens, more of them read more experts, so each takes less than the one before."""
    known = [replace(point(0, 0, tokens), ms=ms, size=EAGER) for tokens, ms in ((32, 8.0), (512, 32.0), (2048, 80.0))]
    table = table_of(replace(HEADER, prompt_graphs=()), (*DECODES, *known))
    for tokens, ms in ((64, 8 * 2**0.5), (128, 16.0), (1024, 48.0)):
        step = StepFeatures(0, 0, tokens, pairs_of(0, tokens), 1, 1)
        assert table.step_s(step) * 1e3 == pytest.approx(ms)
