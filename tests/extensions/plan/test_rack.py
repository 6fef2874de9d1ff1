"""The way from a published figure to the audited ones: arithmetic of the table, and what it reads."""

import pytest

from oscine.extensions.plan.run.scenario import Scenario
from oscine.extensions.plan.search.rack import GPUS, PUBLISHED, STEPS, audited, lines, results
from oscine.extensions.plan.search.trials import Trial


def test_audited_figures_are_those_of_the_published_table() -> None:
    """899,005 tokens per second, as MLPerf Inference v6.1 has them; the file has figures per GPU to a tenth."""
    assert audited("gb200", "Server") == pytest.approx(899_005, abs=4)
    with pytest.raises(ValueError, match="no Offline of h100"):
        audited("h100", "Offline")


def test_each_change_is_applied_to_the_published_figure_and_the_rest_is_named() -> None:
    """Simulated figures per GPU that halve with each assumption; the lower of two rates is within the limits."""
    given: list[Scenario] = []

    def simulate(scenarios: list[Scenario]) -> list[Trial]:
        given[:] = scenarios
        found = []
        for i, one in enumerate(scenarios):
            row = {"output_tput_per_gpu": 8000.0 / 2**i, "tp": 1, "p99_tpot": 0.01}
            row["p99_ttft"] = 1.0 if one.rate is None or one.rate < 12 else 9.0
            found.append(Trial(row, (), "scaled", 7.9))
        return found

    found = {"gb200": results("gb200", simulate)}
    assert [one.tok_s for one in found["gb200"][:-1]] == [8000 * GPUS / 2**i for i in range(len(STEPS) - 1)]
    assert found["gb200"][-1].rate == 11.0
    assert [(one.users, one.rate) for one in given[-5:]] == [
        (694, None),
        (None, 10.0),
        (None, 11.0),
        (None, 12.0),
        (None, 13.0),
    ]
    table = [*lines(found)]
    offline = next(i for i, line in enumerate(table) if "Offline" in line)
    there = PUBLISHED / 2**3
    assert table[offline - 1].split()[-1] == f"{there / 1e6:.3f}"
    assert table[offline].split()[-1] == f"{audited('gb200', 'Offline') / there - 1:+.0%}"
    assert "scaled, attention reads 7.9 times what was measured" in table[-1]
