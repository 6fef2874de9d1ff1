"""Limits of keys, with a clock that the test moves."""

import pytest

from oscine.api.common.errors import APIError
from oscine.api.common.rate_limits import KeyLimits, KeyUse


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(use: KeyUse) -> APIError:
    with pytest.raises(APIError) as caught:
        use.take_request()
    return caught.value


def headers(use: KeyUse) -> dict[str, str]:
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in use.headers()}


def test_requests_come_back_evenly(clock: Clock) -> None:
    use = KeyUse("a", KeyLimits(requests_per_minute=6), clock=clock)
    for _ in range(6):
        use.take_request()
    error = refused(use)
    assert (error.status, error.type, error.code) == (429, "requests", "rate_limit_exceeded")
    assert error.headers["Retry-After"] == "10"
    clock.now += 9.9
    refused(use)
    clock.now += 0.2
    use.take_request()
    clock.now += 1000
    assert headers(use)["remaining-requests"] == "6"


def test_a_prompt_needs_its_tokens_and_an_answer_may_owe_them(clock: Clock) -> None:
    use = KeyUse("a", KeyLimits(tokens_per_minute=600), clock=clock)
    with use.hold(2, 500):
        with pytest.raises(APIError) as caught, use.hold(1, 101):
            pass
        assert (caught.value.status, caught.value.type) == (429, "tokens")
        use.take_generated(700)
    error = refused(use)
    assert error.headers["Retry-After"] == "60"  # 600 owed
    assert headers(use) == {"limit-tokens": "600", "remaining-tokens": "0", "reset-tokens": "2m0s"}
    clock.now += 60.1
    use.take_request()
    assert headers(use)["remaining-tokens"] == "1"


def test_a_prompt_that_no_wait_would_help_is_a_bad_request(clock: Clock) -> None:
    use = KeyUse("a", KeyLimits(tokens_per_minute=600, max_parallel=2), clock=clock)
    for sequences, tokens in ((1, 601), (3, 1)):
        with pytest.raises(APIError) as caught, use.hold(sequences, tokens):
            pass
        assert caught.value.status == 400
    assert headers(use)["remaining-tokens"] == "600"


def test_sequences_at_once(clock: Clock) -> None:
    use = KeyUse("a", KeyLimits(max_parallel=3), clock=clock)
    with use.hold(2, 0):
        with pytest.raises(APIError) as caught, use.hold(2, 0):
            pass
        assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "1")
        with use.hold(1, 0):
            pass
    with use.hold(3, 0):
        pass


@pytest.mark.parametrize(("own", "asked", "given"), [(5, -100, 5), (5, 3, 8), (-2, 0, -2), (None, -7, -7)])
def test_a_client_cannot_outrank_its_key(own: int | None, asked: int, given: int) -> None:
    assert KeyUse("a", KeyLimits(), own).bounded_priority(asked) == given


def test_new_limits_keep_what_was_used(clock: Clock) -> None:
    use = KeyUse("a", KeyLimits(requests_per_minute=2, tokens_per_minute=100), clock=clock)
    use.take_request()
    use.take_generated(40)
    use.change(KeyLimits(requests_per_minute=2, tokens_per_minute=50), 0)
    assert headers(use)["remaining-requests"] == "1"
    assert headers(use)["remaining-tokens"] == "50"


def test_no_limits_no_headers() -> None:
    use = KeyUse("a", KeyLimits())
    for _ in range(1000):
        use.take_request()
    assert headers(use) == {}


def test_lines_of_a_batch_leave_half_of_a_limit_to_other_requests(clock: Clock) -> None:
    use = KeyUse("a", KeyLimits(requests_per_minute=60, tokens_per_minute=1000, max_parallel=4), clock=clock)
    for _ in range(30):
        use.take_request(in_batch=True)
    with pytest.raises(APIError) as caught:
        use.take_request(in_batch=True)
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "1")
    use.give_back_request()
    use.take_request(in_batch=True)
    use.take_request()
    with use.hold(1, 500, in_batch=True), use.hold(1, 0, in_batch=True):
        for sequences, tokens in ((1, 0), (0, 1)):
            with pytest.raises(APIError), use.hold(sequences, tokens, in_batch=True):
                pass
        with use.hold(2, 500):
            pass


def test_a_limit_that_has_no_half_is_a_batchs_too(clock: Clock) -> None:
    use = KeyUse("a", KeyLimits(requests_per_minute=1, tokens_per_minute=100, max_parallel=1), clock=clock)
    use.take_request(in_batch=True)
    with use.hold(1, 100, in_batch=True):
        pass
