"""Whether pages should be fetched, or their prompt be computed here: measured rates of links and of prompts.

Pages are fetched unless their transfer alone would take longer than this engine takes for their tokens. The time that
the other engine needs does not count: it is spent elsewhere, and steps here are free for others. So a slow network ends
the fetching, and a busy prefill replica does not. Before both rates are known, pages are fetched. A link that was found
too slow is tried again after some requests.
"""

from math import inf

from oscine.engine.core.rates import Rate, note_prompt_step
from oscine.types import EngineStats, StepPlan

_OVERHEAD_S = 0.005  # of a transfer: looks of both engines, and the first packets
_PATIENCE_S = 0.5  # with a transfer that is late: it may have to connect first, or a machine be busy


class Worth:
    def __init__(self) -> None:
        self._token = Rate()  # of prompts, computed here
        self._links: dict[str, Rate] = {}  # bytes, by the address of the other engine
        self._connected: set[str] = set()  # these addresses
        self._last = Rate()  # bytes, of the link that was used last

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        note_prompt_step(self._token, plan, seconds)

    def note_transfer(self, address: str, seconds: float, num_bytes: int) -> None:
        """A transfer has ended. The first over a link also makes connections, and does not count."""
        if address in self._connected:
            self.note_late(address, seconds, num_bytes)
        self._connected.add(address)

    def note_late(self, address: str, seconds: float, num_bytes: int) -> None:
        """A transfer was given up after these seconds, in which so many bytes may have come."""
        if num_bytes:
            self._last = self._links.setdefault(address, Rate())
            self._last.note(seconds, num_bytes)

    def forget(self, address: str) -> None:
        """The engine there has ended."""
        self._links.pop(address, None)
        self._connected.discard(address)

    def patience_s(self, num_tokens: int) -> float:
        """After this time a transfer is given up; before a prompt was computed here, never."""
        return _PATIENCE_S + self._compute_s(num_tokens)

    def _compute_s(self, num_tokens: int) -> float:
        per_token = self._token.per_unit
        return num_tokens * per_token if per_token else inf

    def declines(self, address: str, num_bytes: int, num_tokens: int) -> bool:
        """Whether these tokens are computed sooner than their pages arrive over this link."""
        link = self._links.get(address)
        if link is None or num_bytes * link.per_unit <= _OVERHEAD_S + self._compute_s(num_tokens):
            return False
        link.discount()
        return True

    def count(self, stats: EngineStats) -> None:
        for rate, field in ((self._last, "fetch_bytes_per_s"), (self._token, "computed_prompt_tokens_per_s")):
            setattr(stats, field, round(1 / rate.per_unit) if rate.per_unit else 0)
