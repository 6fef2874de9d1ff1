"""Whether the measured best layout is predicted first, or second."""

from oscine.extensions.plan.foreign.compose import GpuLayout
from oscine.extensions.plan.foreign.known import FILE, read_fitted
from oscine.extensions.plan.validate.points import Point, read_points
from oscine.extensions.plan.validate.ranking import rank, ranking_lines

FITTED = read_fitted(FILE)
POINTS = read_points()


def of_layouts(times_ms: dict[int, float]) -> list[Point]:
    """Points of 4 requests per GPU, with the TPOT of each tensor parallelism."""
    return [
        Point("h200_sxm", "vllm", "", GpuLayout(tp, tp, tp, 1), 1024, 64, 4 * tp, tpot_ms, 50.0, "held out")
        for tp, tpot_ms in times_ms.items()
    ]


def test_the_place_of_the_best_layout_and_what_the_first_two_lose() -> None:
    (found,) = rank(of_layouts({1: 10.0, 2: 10.0, 4: 10.0}), FITTED)
    order = [one.tp for one in found.layouts]
    for place, lost in enumerate((0.0, 0.0, 1 - (50 + 64 * 5.0) / (50 + 64 * 10.0))):
        (found,) = rank(of_layouts({**dict.fromkeys(order, 10.0), order[place]: 5.0}), FITTED)
        assert [one.tp for one in found.layouts] == order
        assert found.place == place
        assert abs(found.lost - lost) < 1e-9


def test_a_layout_counts_once_and_two_are_no_group() -> None:
    points = of_layouts({1: 10.0, 2: 6.0})
    again = points[1]._replace(version="later", tpot_ms=7.0)
    assert rank([*points, again], FITTED) == []
    (found,) = rank([*points, again, *of_layouts({4: 20.0})], FITTED)
    assert len(found.layouts) == 3
    assert found.layouts[found.place] == again.layout


def test_the_measured_best_layout_is_within_the_first_two() -> None:
    ranked = rank(POINTS, FITTED)
    assert len(ranked) == 62
    assert sum(one.place == 0 for one in ranked) >= 38
    assert sum(one.place <= 1 for one in ranked) >= 55
    assert sum(one.lost for one in ranked) / len(ranked) < 0.02
    lines = ranking_lines(POINTS, FITTED)
    assert [line.split()[1] for line in lines if line.startswith("all ")] == ["9", "62"]
