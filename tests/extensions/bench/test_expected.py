"""The model of op times that predicts experts on Blackwell, against times measured on Hopper."""

import random
from dataclasses import replace

import pytest

from benchmarks.kernels import expected
from benchmarks.kernels.expected import EXPERTS, MEASURED, PER_TOKEN, counts, work
from oscine.extensions.bench.roofline import expected_experts
from oscine.ops.moe.hopper import Tiling, large


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.op}-{row.chip.name}-{row.tokens}")
def test_measured_times_are_predicted(row: expected.Measured) -> None:
    assert abs(row.error) < (0.08 if row.op.startswith("experts") else 0.15)


@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_experts_of_a_step_are_as_many_as_probability_says(tokens: int) -> None:
    assert work(tokens, Tiling(16)).experts == pytest.approx(expected_experts(EXPERTS, PER_TOKEN, tokens), rel=0.05)


@pytest.mark.parametrize("tokens", [1, 8, 32, 33, 512])
@pytest.mark.parametrize("routing", ["uniform", "power law"])
def test_every_pair_has_an_expert(tokens: int, routing: expected.Routing) -> None:
    found = counts(tokens, EXPERTS, routing, random.Random(1))
    assert sum(found) == tokens * PER_TOKEN
    assert len(found) <= EXPERTS
    assert min(found) > 0


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 32), (32, 32), (33, 64), (64, 64), (65, 80), (80, 80), (81, 128), (128, 128)]
)
def test_columns_of_a_tile_are_those_of_its_loop(rows: int, columns: int) -> None:
    assert expected.hopper_columns(rows, large(128, units=3, stages=3)) == columns


@pytest.mark.parametrize(
    ("chip", "published"), [*zip((expected.B200, expected.GB300), expected.PUBLISHED, strict=True)]
)
def test_experts_on_blackwell_are_predicted_no_slower_than_published(
    chip: expected.Chip, published: expected.Published
) -> None:
    for tokens, us in published.us.items():
        assert expected.blackwell_experts(chip, tokens, "power law") * 1e6 < 0.85 * us


def test_pairs_of_prompts_are_those_of_the_blocks_that_a_kernel_visits() -> None:
    """One tile of 24 queries before position 1,024, which see all pages, or those from key 873 on."""
    chip = replace(expected.H200, clock=1e6, sms=1)
    for window, keys in ((0, 1024), (128, 192)):
        seconds = expected.prompt_attention(chip, 24, 1024, window=window, block=64, pair_cycles=1.0)
        assert seconds == pytest.approx(expected.LAUNCH_S + 24 * keys * 64 * 1e-6 + 8 * expected.TILE_S)


def test_the_program_prints_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    expected.main()
    printed = capsys.readouterr().out.splitlines()
    experts, prompts = 2 * len(expected.PUBLISHED[0].us), 2 * len(expected.PROMPTS)
    assert len(printed) == len(MEASURED) + 2 + 2 + 1 + experts + 2 + 1 + prompts
    assert printed[len(MEASURED) + 1].startswith("largest error")
