"""Traces of requests in the format of Mooncake: JSON lines with the time, the lengths, and blocks of the prompt.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, 2354]}

Times are milliseconds. A block has 512 tokens, and its id stands for all tokens up to its end; the last block of a
prompt may be shorter. What a trace does not tell cannot be found in a cache: prompts are known to be equal in whole
blocks only, and answers have no ids. So hit rates are lower bounds.
"""

from pathlib import Path
from typing import NamedTuple

import msgspec

from oscine.extensions.plan.clock.agenda import ns_of
from oscine.extensions.plan.engine.tokens import Addresses
from oscine.extensions.plan.traffic.session import MAX_OWNER, Pages, Session, Turn, pages

BLOCK = 512  # tokens


class Line(msgspec.Struct, frozen=True):
    """A request, as the file has it."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class Arrival(NamedTuple):
    """A session of one turn, and when it begins."""

    ns: int
    session: Session


def read_trace(path: Path, page_size: int, *, count: int | None = None) -> list[Arrival]:
    """The first `count` requests, by their times. Raises ValueError that names the line, and OSError."""
    if BLOCK % page_size:
        raise ValueError(f"a page size of {page_size} does not divide the blocks of a trace, of {BLOCK} tokens")
    decode = msgspec.json.Decoder(Line).decode
    blocks: dict[int, list[bytes]] = {}
    found: list[Arrival] = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            if text.strip():
                found.append(_arrival(number, decode(text), page_size, blocks))
        except (msgspec.DecodeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: not a request of a trace: {error}") from None
    if not found:
        raise ValueError(f"{path} has no requests")
    found.sort(key=lambda one: one.ns)
    return [one._replace(ns=one.ns - found[0].ns) for one in found[:count]]


def _arrival(number: int, line: Line, page_size: int, blocks: dict[int, list[bytes]]) -> Arrival:
    """`blocks`: addresses of the pages of known blocks. Equal ones are one object, which dictionaries find sooner."""
    if line.timestamp < 0 or line.input_length < 1 or line.output_length < 0:
        raise ValueError("it has a negative time or length")
    num_blocks = -(-line.input_length // BLOCK)
    if len(line.hash_ids) != num_blocks:
        raise ValueError(
            f"{line.input_length} tokens are {num_blocks} blocks, and it has {len(line.hash_ids)} hash_ids"
        )
    if (bad := next((one for one in line.hash_ids if not 0 <= one <= MAX_OWNER), None)) is not None:
        raise ValueError(f"hash_ids must be from 0 to {MAX_OWNER}, not {bad}")
    addresses = _addresses(number, line, page_size, blocks)
    turn = Turn(line.input_length, max(1, line.output_length), addresses)
    return Arrival(ns_of(line.timestamp / 1e3), (turn,))


def _addresses(number: int, line: Line, page_size: int, blocks: dict[int, list[bytes]]) -> Addresses:
    """A block has the pages of its place. A page of the answer, or with the end of the prompt, is of this request."""
    pages_of_block = BLOCK // page_size
    known: list[bytes] = []
    for block in line.hash_ids:
        if (addresses := blocks.get(block)) is None:
            addresses = blocks[block] = pages(block, 0, pages_of_block)
        known += addresses
    return Pages(known[: line.input_length // page_size], number)
