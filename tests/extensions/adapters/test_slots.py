"""Which adapters have a place on the device, and which requests wait for one."""

import random

from oscine.engine.core.request import Request
from oscine.extensions.adapters.slots import MAX_OVERTAKEN, AdapterSlots, WaitingRequests
from oscine.types import GenerationRequest, SamplingParams


def request(arrival: int, priority: int = 0) -> Request:
    given = GenerationRequest(str(arrival), [1], SamplingParams(max_tokens=1), priority)
    return Request(given, arrival=arrival, arrival_s=0.0, max_model_len=8, stream_interval=1)


def test_the_adapter_that_was_not_used_for_longest_goes() -> None:
    slots = AdapterSlots(2)
    places = [slots.take(number) for number in (0, 1)]
    assert slots.take(2) is None
    for number in (1, 0):
        slots.leave(number)
    assert slots.take(0) == places[0]
    assert slots.take(2) == places[1]
    assert not slots.has(1)


def test_an_adapter_keeps_its_place_while_a_request_uses_it() -> None:
    slots = AdapterSlots(1)
    assert slots.take(7) == slots.take(7) == 0
    slots.leave(7)
    assert slots.take(8) is None
    slots.leave(7)
    assert slots.take(8) == 0


def test_a_place_of_a_forgotten_adapter_is_free() -> None:
    slots = AdapterSlots(1)
    slots.take(7)
    slots.leave(7)
    slots.forget(7)
    assert not slots.has(7)
    assert slots.take(8) == 0


def test_any_order_of_requests_gives_places_to_one_adapter_at_a_time() -> None:
    chosen = random.Random(1)
    slots, live = AdapterSlots(3), list[tuple[int, int]]()
    for _ in range(2000):
        if live and chosen.random() < 0.5:
            slots.leave(live.pop(chosen.randrange(len(live)))[0])
        else:
            number = chosen.randrange(6)
            place = slots.take(number)
            used = {other for other, _ in live}
            assert (place is None) == (len(used) == 3 and number not in used)
            if place is not None:
                live.append((number, place))
        places = {number: {place for other, place in live if other == number} for number, _ in live}
        assert all(len(found) == 1 for found in places.values())
        assert len({min(found) for found in places.values()}) == len(places) == slots.num_used


def test_a_request_that_waits_is_overtaken_only_so_often() -> None:
    slots = AdapterSlots(1)
    waiting = WaitingRequests(slots)
    assert slots.take(0) == 0
    first = request(0)
    waiting.add(first, 1)
    for _ in range(MAX_OVERTAKEN):
        assert not waiting.must_wait(0)
        assert slots.take(0) == 0
        waiting.overtaken()
    assert waiting.must_wait(0)
    late = request(1)
    waiting.add(late, 0)
    assert waiting.admitted() == []
    for _ in range(1 + MAX_OVERTAKEN):
        slots.leave(0)
    assert waiting.admitted() == [(first, 1, 0)]
    assert list(waiting) == [late]
    slots.leave(1)
    assert waiting.admitted() == [(late, 0, 0)]


def test_the_most_urgent_request_gets_the_first_place() -> None:
    slots = AdapterSlots(1)
    waiting = WaitingRequests(slots)
    slots.take(0)
    patient, urgent = request(0, priority=1), request(1, priority=0)
    waiting.add(patient, 1)
    waiting.add(urgent, 2)
    slots.leave(0)
    assert waiting.admitted() == [(urgent, 2, 0)]
    assert waiting.remove(patient)
    assert not waiting.remove(patient)
    assert len(waiting) == 0
