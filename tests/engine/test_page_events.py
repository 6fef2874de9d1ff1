"""The events of the prefix cache, followed by an independent reader, give its content."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.engine.core.prefix_index import Medium, extend_digests

from .harness import PAGE, Run, Setting
from .test_engine_properties import prompts, samplings, setting

TEXT = [(11 * i) % 50 for i in range(150)]


class Reader:
    """Page events taken literally: each page's digest, with the tokens that were said to be on it."""

    def __init__(self, run: Run) -> None:
        self.pages: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}  # digest -> that before it, tokens
        run.cache.index.events = self

    def stored(self, digests: list[bytes], token_ids: list[int], places: Sequence[int]) -> None:
        assert [*places] == sorted(set(places))
        for i in places:
            assert digests[i] not in self.pages, "stored twice"
            tokens = tuple(token_ids[i * PAGE : (i + 1) * PAGE])
            assert len(tokens) == PAGE
            self.pages[digests[i]] = (digests[i - 1] if i else None, tokens)

    def removed(self, digests: list[bytes], medium: Medium = "GPU") -> None:
        assert medium == "GPU"
        for digest in digests:
            del self.pages[digest]

    def offloaded(self, digests: list[bytes], medium: Medium) -> None:
        raise AssertionError("nothing is offloaded here")

    def check(self, run: Run) -> None:
        index = run.cache.index
        assert self.pages.keys() == index._pages[0].keys()
        for digest, (parent, tokens) in self.pages.items():
            assert digest == next_digest(parent or index._root, tokens)


def next_digest(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    digests: list[bytes] = []
    extend_digests(digests, list(tokens), 1, page_size=PAGE, root=parent)
    return digests[0]


@pytest.mark.long
@settings(max_examples=60)
@given(
    setting=setting(),
    arrivals=st.lists(st.tuples(prompts, st.integers(1, 100), st.integers(0, 2), samplings), min_size=2, max_size=12),
)
def test_a_reader_knows_the_pages_of_the_cache_after_every_step(
    setting: Setting, arrivals: list[tuple[list[int], int, int, dict[str, object]]]
) -> None:
    run = Run(setting)
    reader = Reader(run)
    for i, (prompt, max_tokens, priority, sampling) in enumerate(arrivals):
        run.add(f"r{i}", prompt, max_tokens, priority, **sampling)
        run.step()
        reader.check(run)
    while run.loop.has_work:
        run.step()
        reader.check(run)


def test_pages_are_evicted_in_the_run_above() -> None:
    """So that it has something to test."""
    run = Run(Setting(num_full_pages=10))
    reader = Reader(run)
    run.add("first", TEXT[:140], max_tokens=2)
    run.finish()
    first = set(reader.pages)
    assert len(first) == 8
    run.add("second", TEXT[::-1][:140], max_tokens=2)
    run.finish()
    reader.check(run)
    assert first - reader.pages.keys()
