"""When an engine tells its statistics: at intervals, and once when its last request has ended."""

from collections.abc import Callable

INTERVAL_S = 0.1


class DueStatistics:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.told_s = 0.0  # when they were told last
        self._clock = clock
        self._told_idle = False  # by the last ones

    def are_due(self, *, has_work: bool) -> bool:
        """If so, they count as told."""
        now_s = self._clock()
        is_news = not has_work and not self._told_idle
        self._told_idle = self._told_idle and not has_work
        if not is_news and now_s - self.told_s < INTERVAL_S:
            return False
        self.told_s, self._told_idle = now_s, not has_work
        return True
