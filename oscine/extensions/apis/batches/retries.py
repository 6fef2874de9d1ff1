"""When a request of a batch is sent again: the server may be full, or its engine may be starting."""

import contextlib

_DELAYS_S = (0.5, 30.0)  # before asking again: at first, at most
_FAILURES = 3  # of the engine during one request; then the request is to blame
_RATE_LIMITED = 429
_BUSY = (_RATE_LIMITED, 503, 529)  # 529 is Anthropic's
# By the code of the error, or by its message in Anthropic's shape, which has no code.
_ENGINE_FAILURES = (b'"engine_died"', b'"engine_failed"', b'"The engine failed:', b'"The request failed:')


def is_busy(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status in _BUSY


class Retries:
    """The attempts of one request."""

    def __init__(self) -> None:
        self._failures = 0
        self._delay_s, self._longest_s = _DELAYS_S

    def delay_s(self, status: int, body: bytes, retry_after: str | None) -> float | None:
        """Seconds until the next attempt; None: this answer is final."""
        self._failures += status == 503 and any(text in body for text in _ENGINE_FAILURES)
        if not is_busy(status) or self._failures == _FAILURES:
            return None
        if status == _RATE_LIMITED and retry_after is not None and retry_after.isdecimal():
            return min(float(retry_after), self._longest_s)  # it will do then: no reason to wait longer each time
        return self.next_delay_s(retry_after)

    def next_delay_s(self, retry_after: str | None = None) -> float:
        """The same without an answer."""
        with contextlib.suppress(ValueError):
            self._delay_s = max(self._delay_s, min(float(retry_after or 0), self._longest_s))
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, self._longest_s)
        return delay_s
