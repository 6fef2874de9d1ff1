"""The sleeper of the fake executor, which has no memory to free. Imports no torch."""

from oscine.extensions.models.sleep.allowed import check_sleep
from oscine.settings.config import EngineOptions


class NoSleeper:
    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass


def fake_sleeper_of(options: EngineOptions) -> NoSleeper:
    """Raises ValueError for what cannot be combined with --enable-sleep-mode."""
    check_sleep(options)
    return NoSleeper()
