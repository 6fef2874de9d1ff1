"""Sessions of random lengths: the same as those of `oscine bench serve` with equal options and seed."""

from collections.abc import Iterator
from itertools import accumulate, count

from oscine.extensions.bench.serve.load import Shapes
from oscine.extensions.plan.traffic.session import Pages, Session, Turn, pages


def sessions(shapes: Shapes, page_size: int) -> Iterator[Session]:
    """A turn has all earlier prompts and answers of its session before it, word for word."""
    num_shared = shapes.prefix_tokens // page_size
    prefixes = [pages(place, 0, num_shared) for place in range(shapes.num_prefixes)]
    for number, (prefix, lengths) in zip(count(), shapes.draw(), strict=False):
        addresses = Pages((), number) if prefix is None else Pages(prefixes[prefix], number)
        before = accumulate((isl + osl for isl, osl in lengths), initial=shapes.prefix_tokens)
        yield tuple(Turn(have + isl, osl, addresses) for have, (isl, osl) in zip(before, lengths, strict=False))
