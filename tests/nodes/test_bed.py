"""The nodes of the test bed are machines of their own: they share a network, and nothing else."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.nodes.bed import CLIENT, Bed, Link, Node, settled
from tests.nodes.entered import ROOT

DELAY_S, RATE = 0.05, 2e6


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with Bed(3, {3: Link(delay_s=DELAY_S)}) as bed:
        yield bed


def found(node: Node, address: str = "127.0.0.1") -> dict[str, bool]:
    return dict(json.loads(node.python("-m", "tests.nodes.traces", "find", address)))


def test_a_node_finds_nothing_of_another_one_but_its_ports(bed: Bed) -> None:
    first, second, _ = bed.nodes
    leaver = first.popen(sys.executable, "-m", "tests.nodes.traces", "leave", stdout=subprocess.PIPE)
    assert leaver.stdout is not None
    assert leaver.stdout.readline().startswith("ready")
    here, there = found(first), found(second)
    assert len(here) == 9
    assert all(here.values()), "what is looked for is there"
    assert not any(there.values())
    assert found(second, first.address) == dict.fromkeys(there, False) | {"port": True}
    assert [node.run("hostname").strip() for node in bed.nodes] == ["node1", "node2", "node3"]


def test_a_node_cannot_change_files_that_all_nodes_read(bed: Bed) -> None:
    first, *_ = bed.nodes
    for path in ("/trace", ROOT / "trace", "/etc/trace", "./trace"):
        with pytest.raises(AssertionError, match="Read-only file system"):
            first.run("touch", str(path))


def test_no_packet_can_leave_the_bed(bed: Bed) -> None:
    first, *_ = bed.nodes
    assert first.run("ip", "-json", "route", "show", "default").strip() in ("", "[]", "[ ]")
    with pytest.raises(AssertionError, match="Network is unreachable"):
        first.python("-c", "import socket; socket.create_connection(('192.0.2.1', 80))")


PING = """
import socket, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    one.connect((sys.argv[1], 7))
    one.settimeout(float(sys.argv[2]))
    num_back, first_s = 0, None
    for number in range(int(sys.argv[3])):
        begun_s = time.monotonic()
        try: one.send(b'%d' % number)
        except ConnectionRefusedError: pass  # of an earlier one
        try: one.recv(100)
        except TimeoutError: continue
        except ConnectionRefusedError: pass  # the answer to a closed port
        num_back += 1
        first_s = first_s or time.monotonic() - begun_s
    print(num_back, first_s)
"""


def ping(node: Node, to: str, wait_s: float = 20.0, count: int = 1) -> tuple[int, float | None]:
    """Answers, and the seconds until the first."""
    num_back, first_s = node.python("-c", PING, to, str(wait_s), str(count)).split()
    return int(num_back), None if first_s == "None" else float(first_s)


def test_a_link_delays_each_packet_in_both_directions(bed: Bed) -> None:
    first, _, far = bed.nodes
    back, seconds = ping(first, far.address)
    assert back == 1
    assert seconds is not None
    assert seconds >= 2 * DELAY_S


def test_a_link_loses_packets(bed: Bed) -> None:
    _, _, far = bed.nodes
    assert ping(far, CLIENT)[0] == 1  # also that both know where the other one is
    far.set_link(Link(loss=1.0))
    assert ping(far, CLIENT, wait_s=0.2) == (0, None)
    far.set_link(Link(loss=0.5))
    answered, _ = ping(far, CLIENT, wait_s=0.05, count=40)
    assert 0 < answered < 40
    far.set_link(Link())


SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7778)) as one:
    one.sendall(bytes(int(sys.argv[2])))
    one.shutdown(socket.SHUT_WR)
    one.recv(1)
"""
RECEIVE = """
import socket
with socket.create_server(('0.0.0.0', 7778)) as server:
    print('ready', flush=True)
    one, _ = server.accept()
    while one.recv(1 << 16): pass
    one.sendall(b'1')
"""


def test_a_link_has_a_rate(bed: Bed) -> None:
    first, _, far = bed.nodes
    far.set_link(Link(bytes_s=RATE))
    receiver = far.popen(sys.executable, "-c", RECEIVE, stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    begun_s = time.monotonic()
    first.python("-c", SEND, far.address, str(int(RATE)))
    assert time.monotonic() - begun_s >= 0.9
    far.set_link(Link())


def test_a_partition_separates_and_heals(bed: Bed) -> None:
    first, second, far = bed.nodes
    bed.partition([second, far])
    assert ping(first, second.address, wait_s=0.2)[0] == 0
    assert ping(second, far.address)[0] == 1
    bed.heal()
    assert ping(first, second.address)[0] == 1


def test_killing_a_node_ends_all_of_its_processes(bed: Bed) -> None:
    """The last test: it takes a node of the bed."""
    first, second, _ = bed.nodes
    code = "import subprocess; one = subprocess.Popen(['sleep', '1000']); print('ready', flush=True); one.wait()"
    one = second.popen(sys.executable, "-c", code, stdout=subprocess.PIPE)
    assert one.stdout is not None
    assert one.stdout.readline() == "ready\n"
    processes = second.processes()
    assert len(processes) >= 2
    second.kill()
    settled(processes)
    assert first.run("hostname") == "node1\n"
