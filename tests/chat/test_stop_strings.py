import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.chat.stop_strings import StopStrings

letters = st.text(alphabet="ab\n", max_size=12)
stops_of = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


def cut_by_definition(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first, the longest of those."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@pytest.mark.long
@settings(max_examples=500)
@given(pieces=st.lists(letters), stops=stops_of)
def test_shows_what_comes_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    expected = cut_by_definition("".join(pieces), stops)
    shown, fed = "", ""
    for piece in pieces:
        shown, fed = shown + matcher.feed(piece), fed + piece
        assert expected.startswith(shown)
        held = fed[len(shown) :]
        assert matcher.matched or not held or any(stop.startswith(held) for stop in stops)
    assert shown + matcher.finish() == expected
    assert (matcher.matched is not None) == any(stop in fed for stop in stops)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_memory_is_that_of_the_stop_strings() -> None:
    stop = "ab" * 5_000
    tracemalloc.start()
    matcher = StopStrings([stop])
    assert matcher.feed(stop[:-1]) == ""
    assert matcher.feed("c") == stop[:-1] + "c"
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 20 * len(stop)
