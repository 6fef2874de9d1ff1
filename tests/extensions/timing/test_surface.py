"""Interpolation and extrapolation of step times."""

from math import log

import pytest

from oscine.extensions.timing.surface import Surface
from oscine.extensions.timing.table import shipped_tables
from oscine.timing.table import StepPoint

DECODES = [(1, 1000, 2.0), (1, 3000, 3.0), (8, 1000, 4.0), (64, 1000, 16.0)]
PROMPTS = [(1024, 1024, 30.0), (8192, 8192, 120.0), (8192, 32768, 150.0)]


def surface() -> Surface:
    decodes = [StepPoint("decode", ms, rows=rows, context=context) for rows, context, ms in DECODES]
    return Surface([*decodes, *(StepPoint("prompts", ms, tokens=n, pairs=pairs) for n, pairs, ms in PROMPTS)])


def test_points_are_exact() -> None:
    found = surface()
    for rows, context, ms in DECODES:
        assert found.decode_ms(rows, context) == pytest.approx(ms)
    for tokens, pairs, ms in PROMPTS:
        assert found.prompts_ms(tokens, pairs) == pytest.approx(ms)


@pytest.mark.parametrize(
    ("rows", "context", "ms"),
    [
        (1, 2000, 2.5),  # between contexts: linear
        (1, 5000, 4.0),  # beyond the longest: the same slope
        (1, 10, 2.0),  # below the shortest: as the shortest
        (8, 9000, 4.0),  # of the only context there is
        (2, 1000, 2.0 * 2 ** (log(2) / log(8))),  # between sizes: a power of the rows
        (512, 1000, 64.0),  # beyond the largest: the last power, 8 times the rows for 4 times the time
    ],
)
def test_decode_steps_between_points_and_beyond(rows: int, context: int, ms: float) -> None:
    assert surface().decode_ms(rows, context) == pytest.approx(ms)


def test_prompts_between_points_and_beyond() -> None:
    found = surface()
    assert found.prompts_ms(8192, (8192 + 32768) / 2) == pytest.approx(135.0)
    assert found.prompts_ms(100, 100) == pytest.approx(30.0), "a small step is bound by latency"
    assert found.prompts_ms(16384, 16384) == pytest.approx(240.0), "a larger one has the speed of the largest"
    assert found.prompts_ms(16384, 65536) == pytest.approx(300.0)


def test_more_work_never_takes_less_time() -> None:
    for table in shipped_tables():
        found = Surface(table.points)
        decodes = [found.decode_ms(rows, 1536) for rows in range(1, 2049)]
        prompts = [found.prompts_ms(tokens, tokens * 512) for tokens in range(64, 20000, 64)]
        assert decodes == sorted(decodes)
        assert prompts == sorted(prompts)
        assert found.decode_ms(1, 2048) <= found.decode_ms(1, 65536)


def test_shipped_tables_say_where_their_times_come_from() -> None:
    headers = [table.header for table in shipped_tables()]
    assert {(one.model, one.gpu, one.num_gpus) for one in headers} >= {
        ("120b", "NVIDIA H200", 1),
        ("20b", "NVIDIA H200", 2),
    }
    for one in headers:
        assert one.source
        assert one.num_gpus == max(one.tensor_parallel_size, one.expert_parallel_size)
        assert (one.link_bytes_per_s > 0) == (one.num_gpus > 1)


def test_a_table_without_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="steps of prompts"):
        Surface([StepPoint("decode", 1.0, rows=1, context=1)])
