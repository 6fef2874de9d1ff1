"""The load of a pool, from the counters of its engines."""

from oscine.extensions.cluster.scaling.pool_load import report
from oscine.types import EngineStats


def test_counters_are_told_by_their_growth() -> None:
    before = EngineStats(steps=5, inter_tokens=10, inter_token_s=1.0)
    now = EngineStats(steps=9, inter_tokens=16, inter_token_s=1.5)
    assert (report(now, before)["inter_tokens"], report(now, before)["inter_token_s"]) == (6.0, 0.5)


def test_an_engine_that_was_started_again_adds_nothing() -> None:
    """Also where one counter is already above that of the life before: tokens that took no time would come of it."""
    before = EngineStats(steps=50, requests=9, inter_tokens=10, inter_token_s=9.0)
    now = EngineStats(steps=7, requests=1, inter_tokens=12, inter_token_s=0.5)
    told = report(now, before)
    assert (told["inter_tokens"], told["inter_token_s"]) == (0.0, 0.0)
