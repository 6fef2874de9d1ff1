"""The plot and the table of docs/results.md, from result files."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from oscine.extensions.bench import plot, table
from oscine.extensions.bench.result import append
from tests.extensions.bench.test_result import RESULT


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "results.jsonl"
    append(path, replace(RESULT, output_tok_s=1.0))  # replaced by a later measurement of the same point
    for model, concurrency, output, user in [("20b", 1, 550, 570), ("120b", 64, 2700, 54), ("120b", 1, 390, 410.5)]:
        append(path, replace(RESULT, model=model, concurrency=concurrency, output_tok_s=output, tok_s_user=user))
    append(path, replace(RESULT, model="oscine-nano", roofline_share=None))
    return path


@pytest.mark.long
def test_the_plot_shows_us_and_the_others(results: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "img" / "a.svg", tmp_path / "img" / "b.svg"
    for path in (first, second):
        plot.main([str(results), "--output", str(path)])
    text = first.read_text()
    for name in ("Oscine", "vLLM 0.26", "vLLM 0.18", "TensorRT-LLM", "MLPerf", "GB200", "gpt-oss-120b", "gpt-oss-20b"):
        assert name in text
    assert text == second.read_text(), "the same results are the same file"


@pytest.mark.long
def test_without_results_of_a_model_the_others_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append(path, replace(RESULT, model="120b"))
    plot.main([str(path), "--output", str(tmp_path / "plot.png")])
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_the_table_has_the_last_result_of_each_point(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table.main([str(results)])
    header, rule, *rows = capsys.readouterr().out.splitlines()
    assert header.count("|") == rule.count("|") == rows[0].count("|")
    assert [row.split(" | ")[:3] for row in rows] == [
        ["| oscine-nano", "64", "1024/256"],
        ["| 120b", "1", "1024/256"],
        ["| 120b", "64", "1024/256"],
        ["| 20b", "1", "1024/256"],
    ]
    assert rows[1] == "| 120b | 1 | 1024/256 | 390 (226) | 410 (239) | 20.00 ms | 69% | 54,000 (19,000) |"
    assert rows[2] == "| 120b | 64 | 1024/256 | 2,700 (1,805) | 54 (40) | 20.00 ms | 69% | 54,000 (45,000) |"


@pytest.mark.long
def test_energy_is_shown_where_it_was_counted(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = replace(RESULT, model="120b", concurrency=64, joules_per_output_token=0.2586, watts=700.1)
    append(results, counted)
    table.main([str(results)])
    header, rule, nano, single, many, *_ = capsys.readouterr().out.splitlines()
    assert header.endswith("| J/output token | watts |")
    assert {line.count("|") for line in (header, rule, nano, single, many)} == {11}
    assert many.endswith(" | 0.259 | 700 |")
    assert single.endswith(" |  |  |")
    plot.main([str(results), "--output", str(tmp_path / "plot.svg")])
    assert "joules per generated token" in (tmp_path / "plot.svg").read_text()


@pytest.mark.parametrize("main", [plot.main, table.main], ids=["plot", "table"])
def test_results_that_cannot_be_read_are_named(
    main: Callable[[Sequence[str]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("no result\n")
    for path in (broken, tmp_path / "absent.jsonl"):
        with pytest.raises(SystemExit):
            main([str(path)])
        assert str(path) in capsys.readouterr().err.splitlines()[-1]


def test_a_front_joins_only_points_that_no_other_beats() -> None:
    points = [
        (100.0, 50.0, 1.0),
        (80.0, 40.0, 2.0),
        (80.0, 90.0, 4.0),
        (90.0, 90.0, 8.0),
        (20.0, 85.0, 16.0),
        (10.0, 200.0, 32.0),
    ]
    assert [load for _, _, load in plot.front(points)] == [32, 8, 1]
    assert [load for _, _, load in plot.front(points, low_is_better=True)] == [2, 1]
    assert plot.front([]) == []
