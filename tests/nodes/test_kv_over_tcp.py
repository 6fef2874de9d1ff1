"""Pages cross the network between two nodes, over TCP; a link that dies fails its transfer, and nothing else."""

import json
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest

pytest.importorskip("nixl_cu13", reason="it moves the pages")

from tests.nodes.bed import Bed, Link, Node
from tests.nodes.pages import GROUP
from tests.waiting import wait_until

PAGES = 40
BYTES = PAGES * GROUP.page_bytes


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with Bed(3, {3: Link()}) as bed:
        yield bed


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


class Reader:
    """A process that reads the pages of another node."""

    def __init__(self, node: Node, source: Node, num_pages: int = PAGES) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        module = (sys.executable, "-m", "tests.nodes.pages")
        self._source = source.popen(*module, "serve", str(num_pages), **pipes)
        self._process = node.popen(*module, "read", str(num_pages), line(self._source), **pipes)

    def ask(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        return dict(json.loads(line(self._process)))

    def read(self) -> dict[str, Any]:
        self.ask()
        return self.answer()

    def close(self) -> None:
        for process in (self._process, self._source):
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def test_pages_cross_the_network_and_are_equal(bed: Bed) -> None:
    """Counted by the device: the processes are on one kernel, and could have read each other's memory."""
    first, second, _ = bed.nodes
    reader = Reader(second, first)
    before = second.received_bytes()
    found = reader.read()
    assert (found["state"], found["error"], found["equal"], found["way"]) == ("done", None, True, "tcp")
    assert found["bytes"] == BYTES
    assert BYTES < second.received_bytes() - before < 1.2 * BYTES
    reader.close()


def test_pages_of_the_same_node_do_not_cross_the_network(bed: Bed) -> None:
    first, _, _ = bed.nodes
    reader = Reader(first, first)
    before = first.received_bytes()
    found = reader.read()
    assert (found["state"], found["equal"], found["way"]) == ("done", True, "memory")
    assert first.received_bytes() - before < 0.1 * BYTES
    reader.close()


def test_a_link_that_dies_fails_the_transfer_and_the_next_one_connects_anew(bed: Bed) -> None:
    """In the middle: at this rate the transfer would take 16 s. The kernel asks the other side after 2 s of silence."""
    _, second, far = bed.nodes
    reader = Reader(far, second)
    assert reader.read()["state"] == "done"
    far.set_link(Link(bytes_s=1e6))
    before = far.received_bytes()
    reader.ask()
    wait_until(lambda: far.received_bytes() - before >= 500_000, "the first bytes")
    far.set_link(Link(loss=1.0))
    found = reader.answer()
    assert found["state"] == "failed"
    assert found["error"]
    assert found["bytes"] < BYTES
    far.set_link(Link())
    again = Reader(far, second)
    assert again.read()["equal"]
    again.close()
    reader.close()


@pytest.mark.slow
def test_the_rate_is_near_that_of_raw_tcp(bed: Bed) -> None:
    """Medians of runs in turns, as other processes may use the cores in some of them."""
    first, second, _ = bed.nodes
    reader, num_bytes = Reader(second, first, 600), 256 << 20
    nixl, raw = [], []
    reader.read()
    for _ in range(12):
        found = reader.read()
        nixl.append(found["bytes"] / found["seconds"])
        receiver = second.popen(sys.executable, "-m", "tests.nodes.pages", "receive", stdout=subprocess.PIPE)
        sent = first.python("-m", "tests.nodes.pages", "send", second.address, line(receiver), str(num_bytes))
        found = json.loads(sent)
        raw.append(found["bytes"] / found["seconds"])
    reader.close()
    print(f"NIXL {median(nixl) / 1e9:.2f} GB/s, raw TCP {median(raw) / 1e9:.2f} GB/s, medians of 12")
    assert median(nixl) > 0.7 * median(raw)
