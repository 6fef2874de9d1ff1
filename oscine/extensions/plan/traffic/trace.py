"""Traces of requests (TraceLine in bench/serve/load.py) as the pages of their prompts.

What a trace does not tell cannot be found in a cache: prompts are known to be equal in whole blocks only, and answers
have no ids. So hit rates are lower bounds.
"""

from pathlib import Path
from typing import NamedTuple

from oscine.extensions.bench.serve.load import BLOCK, TraceLine, read_trace_lines
from oscine.extensions.plan.clock.agenda import ns_of
from oscine.extensions.plan.engine.tokens import Addresses
from oscine.extensions.plan.traffic.session import MAX_OWNER, Pages, Session, Turn, pages


class Arrival(NamedTuple):
    """A session of one turn, and when it begins."""

    ns: int
    session: Session


def read_trace(path: Path, page_size: int, *, count: int | None = None, speed: float = 1.0) -> list[Arrival]:
    """The first `count` requests, by their times. Raises ValueError that names the line, and OSError.

    speed: by which they come faster than in the trace.
    """
    if BLOCK % page_size:
        raise ValueError(f"a page size of {page_size} does not divide the blocks of a trace, of {BLOCK} tokens")
    blocks: dict[int, list[bytes]] = {}
    lines = read_trace_lines(path)
    first_ms = lines[0][1].timestamp
    found: list[Arrival] = []
    for number, line in lines:
        if (bad := next((one for one in line.hash_ids if not 0 <= one <= MAX_OWNER), None)) is not None:
            raise ValueError(
                f"{path}:{number}: not a request of a trace: hash_ids must be from 0 to {MAX_OWNER}, not {bad}"
            )
        turn = Turn(line.input_length, max(1, line.output_length), _addresses(number, line, page_size, blocks))
        found.append(Arrival(ns_of((line.timestamp - first_ms) / 1e3 / speed), (turn,)))
    return found[:count]


def _addresses(number: int, line: TraceLine, page_size: int, blocks: dict[int, list[bytes]]) -> Addresses:
    """`blocks`: addresses of the pages of known blocks. Equal ones are one object, which dictionaries find sooner.

    A block has the pages of its place. A page of the answer, or with the end of the prompt, is of this request. So are
    pages from a block on that the prompt has had before: an id stands for a prefix, and such a line has other ids."""
    pages_of_block = BLOCK // page_size
    known: list[bytes] = []
    hash_ids = line.hash_ids
    if len({*hash_ids}) < len(hash_ids):
        hash_ids = hash_ids[: next(i for i, block in enumerate(hash_ids) if block in hash_ids[:i])]
    for block in hash_ids:
        if (addresses := blocks.get(block)) is None:
            addresses = blocks[block] = pages(block, 0, pages_of_block)
        known += addresses
    return Pages(known[: line.input_length // page_size], number)
