"""The duration of each phase of a start, as one line."""

import time


class Stopwatch:
    def __init__(self) -> None:
        self._start_s = self._lap_s = time.monotonic()
        self._laps: list[tuple[str, float]] = []  # name, seconds

    def lap(self, name: str) -> None:
        """Records the time since the last lap under this name."""
        now = time.monotonic()
        self._laps.append((name, now - self._lap_s))
        self._lap_s = now

    def __str__(self) -> str:
        laps = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._laps)
        return f"ready in {self._lap_s - self._start_s:.1f} s: {laps}"
