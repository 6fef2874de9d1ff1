"""Measures the embedded model with a tiny grid, and checks which steps are measured."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from oscine.cli import main
from oscine.executor.kv.limits import prompt_sizes_up_to, sizes_up_to
from oscine.extensions.profile.grid import (
    HELD_OUT,
    HELD_OUT_UNLIKE,
    LEVELS,
    Levels,
    Limits,
    Shape,
    grid,
    held_out,
    page_span,
)
from oscine.extensions.profile.measure import profile, verified
from oscine.extensions.profile.steps import DROPPED, Times
from oscine.timing.kinds import EAGER, NO_GRAPHS, GraphSizes
from oscine.timing.read import check, read_table
from oscine.types import DecodeTimes

GPU = Limits(
    max_num_seqs=512,
    step_tokens=8192,
    max_model_len=131072,
    page_size=64,
    pages=(16000, 9000),
    windows=(None, 128),
    graphs=GraphSizes(tuple(sizes_up_to(512)), tuple(prompt_sizes_up_to(2048)), 512),
)
SMALL = Limits(4, 64, 512, 64, (30, 30), (None, 128), NO_GRAPHS)


@pytest.mark.parametrize("limits", [GPU, SMALL])
def test_every_step_of_a_grid_fits_the_engine(limits: Limits) -> None:
    for level in range(LEVELS):
        shapes = grid(limits, Levels(level, level, level), 15)
        assert {shape.kind for shape in shapes} == {"decode", "prompts", "mixed"}
        for shape in shapes:
            step = shape.features(15)
            assert step.sequences <= limits.max_num_seqs
            assert step.tokens <= limits.step_tokens
            assert sum(shape.lengths()) == shape.tokens
            spans = [(one, one + 15) for one in shape.contexts()]
            spans += [(shape.start, shape.start + length) for length in shape.lengths()]
            for pages, window in zip(limits.pages, limits.windows, strict=True):
                assert sum(len(page_span(*span, window, limits.page_size)) for span in spans) <= pages


def test_a_finer_grid_has_more_steps_and_the_same_ends() -> None:
    grids = [grid(GPU, Levels(level, level, level), 15) for level in range(LEVELS)]
    assert all(len(coarse) < len(fine) for coarse, fine in pairwise(grids))
    for shapes in grids:
        assert max(shape.rows for shape in shapes if shape.kind == "decode") == 512
        assert max(shape.tokens for shape in shapes if shape.kind == "prompts") == 8192
    assert {shape.rows for shape in grids[-1] if shape.kind == "decode"} >= {*GPU.graphs.decode}
    for shapes in grids:  # 31 pages for each of 512 rows: one to grow
        assert max(shape.context for shape in shapes if shape.rows == 512 and shape.kind == "decode") == 30 * 64
        mixed = [one for one in shapes if one.kind == "mixed"]  # the largest ones in graphs, the smallest eager ones
        assert max(one.rows + one.tokens for one in mixed if GPU.graphs.size_of(one.features())) == 2048
        assert min(one.rows + one.tokens for one in mixed if not GPU.graphs.size_of(one.features())) == 2304
    eager = [one for one in grids[-1] if GPU.graphs.size_of(one.features()) == EAGER]
    assert {shape.kind for shape in eager} == {"prompts", "mixed"}


@pytest.mark.parametrize("level", range(LEVELS))
def test_each_grid_has_long_prompts_and_long_contexts(level: int) -> None:
    shapes = grid(GPU, Levels(level, level, level), 15)
    for kind, sizes in (("prompts", {2048, 8192}), ("mixed", {2048, 8192})):
        deep = [one for one in shapes if one.kind == kind and one.start > 65536 and one.rows + one.tokens in sizes]
        assert {one.rows + one.tokens for one in deep} == sizes
        assert all(one.start + one.tokens > GPU.max_model_len - 2 * GPU.page_size for one in deep)
    assert 128 in {one.tokens for one in shapes if one.kind == "prompts"}
    assert max(one.context for one in shapes if one.rows == 1 and one.kind == "decode") > 120_000
    assert not any(one.longest for one in shapes)


def test_graphs_of_drafts_leave_the_decodes_of_a_grid_as_they_are() -> None:
    drafting = GPU._replace(graphs=GPU.graphs._replace(decode=tuple(sizes_up_to(1024))))
    for level in range(LEVELS):
        found, plain = ([*grid(limits, Levels(decode=level), 15)] for limits in (drafting, GPU))
        assert [one for one in found if one.kind == "decode"] == [one for one in plain if one.kind == "decode"]


def test_steps_that_are_held_out_are_random_and_the_same_for_a_seed() -> None:
    shapes = grid(GPU, Levels(2, 2, 2), 15)
    found = held_out(GPU, shapes, 15)
    assert len(found) == HELD_OUT + HELD_OUT_UNLIKE
    assert sum(shape.longest > 0 for shape in found) == HELD_OUT_UNLIKE
    assert sum(shape.many > 1 for shape in found) >= HELD_OUT_UNLIKE // 2
    assert all(shape.fits(GPU, 15) for shape in found)
    assert found == held_out(GPU, shapes, 15) != held_out(GPU, shapes, 15, seed=1)


def test_pages_of_a_window() -> None:
    assert page_span(1024, 1025, None, 64) == range(17)
    assert page_span(1024, 1025, 128, 64) == range(14, 17)
    assert page_span(0, 65, 128, 64) == range(2)
    assert Shape(2, 64, longest=128).contexts() == [128, 64]


class Even:
    """An engine whose steps take as long as their contexts are in total."""

    limits, gpus = SMALL, ()

    def measure(self, shape: Shape, count: int) -> Times:
        ms = [1e-3 * (shape.tokens + sum(shape.contexts()))] * (count - DROPPED)
        return Times(ms, ms)


def test_a_profile_has_one_point_of_each_sum_of_contexts() -> None:
    """In a small engine, a step that is left out often has the sum of another one."""
    for seed in range(30):
        points = profile(Even(), 0.0, seed=seed).points
        assert len({one.key for one in points}) == len(points)


def test_how_long_it_takes_is_said_before_it_is_measured() -> None:
    said = list[tuple[str, float]]()
    measured = profile(
        Even(),
        0.0,
        begin=lambda count, about_s: said.extend((("steps", count), ("seconds", about_s))),
        progress=lambda done, count: said.append(("done", done)),
    )
    (_, count), (_, about_s), *done = said
    assert len(measured.points) <= count
    assert about_s > 0
    assert done[0] == ("done", 1)


def test_times_of_drafts_become_points() -> None:
    (one, two) = verified({2: DecodeTimes(0.001, (0.0011, 0.0015, 0.002))}, SMALL)
    assert (one.rows, one.drafts, one.sampled, one.ms) == (4, 2, 2, 1.5)
    assert (two.rows, two.drafts, two.sampled, two.ms) == (6, 4, 2, 2.0)


def test_the_embedded_model_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "steps.jsonl"
    limits = ["--max-model-len", "512", "--max-num-batched-tokens", "64", "--max-num-seqs", "4"]
    options = ["--device", "cpu", "--threads", "1", "--seconds", "0.5", "--commit", "abc"]
    assert main(["profile", *limits, *options, "--output", str(output)]) in (0, None)
    printed, said = capsys.readouterr()
    assert re.search(r"^measuring \d+ steps, about \d+ s", said, re.MULTILINE)
    table = read_table(output)
    header = table.header
    assert (header.gpu, header.model, header.commit, header.figures) == ("cpu", "oscine-nano", "abc", "measured")
    assert (header.max_num_seqs, header.max_num_batched_tokens, header.page_size) == (4, 64, 64)
    fitted = [one for one in table.points if not one.held_out]
    kept = [one for one in table.points if one.held_out]
    assert {one.kind for one in fitted} == {"decode", "prompts", "mixed"}
    assert 0 < len(kept) <= HELD_OUT + HELD_OUT_UNLIKE
    assert f"{len(fitted)} points" in printed
    assert f"{len(kept)} steps that were left out" in printed
    for one in table.points:
        assert one.count >= 2
        assert one.size == EAGER
        assert one.mad <= one.ms
        assert one.rows + one.tokens <= 64
    assert check(table, fitted).not_measured == 0


@pytest.mark.parametrize("max_model_len", [6, 64])
def test_an_engine_that_is_too_small_gets_one_line(
    max_model_len: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--threads", "1", "--seconds", "0.1", "--max-model-len", str(max_model_len)]
    limits = ["--max-num-seqs", "1", "--max-num-batched-tokens", "16"]
    assert main(["profile", *options, *limits, "--output", str(tmp_path / "steps.jsonl")])
    *_, line = capsys.readouterr().err.splitlines()
    assert line == f"oscine: error: {max_model_len} tokens per sequence are too few for a table of step times"
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "--output FILE is needed"),
        (["--output", "/nowhere/x"], "--output /nowhere/x: no file"),
        (["--output", "/"], "--output /: no file"),
        (["--output", "/proc/x"], "--output /proc/x: no file"),
        (["--output", "/dev/null", "--seconds", "0"], "--seconds must be above 0"),
        (["--output", "x", "--data-parallel-size", "2"], "share nothing"),
        (["import", "/nowhere", "--system", "gb200", "--framework", "vllm", "--version", "1", "--output", "x"], ""),
    ],
)
def test_bad_options_get_one_line(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["profile", *arguments]))
    assert ended.value.code not in (0, None)
    (line,) = capsys.readouterr().err.splitlines()
    assert error in line
