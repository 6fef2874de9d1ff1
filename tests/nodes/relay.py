"""Carries packets between two TAP devices, which it makes: late, at a bounded rate, and not all of them.

    python -m tests.nodes.relay DEVICE DEVICE

Each line of standard input is a JSON object with `delay_s`, `loss` and `bytes_s` for both directions; `ready` answers
it. Which packets are lost follows from their number alone. The kernel's own netem does the same, but is not everywhere.
"""

import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time

_TUNSETIFF = 0x400454CA  # <linux/if_tun.h>
_TAP, _NO_INFO = 0x0002, 0x1000
_LARGEST = 65536  # bytes of a packet
_QUEUE_S = 0.5  # longest wait for the rate; what would wait longer is dropped, as by a router


class _Direction:
    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self._random = random.Random(7)
        self._free_s = 0.0  # when the link has sent all before

    def due_s(self, now_s: float, num_bytes: int, path: dict[str, float]) -> float | None:
        """When a packet arrives; None for never."""
        if self._random.random() < path["loss"]:
            return None
        begun_s = max(now_s, self._free_s)
        if begun_s - now_s > _QUEUE_S:
            return None
        self._free_s = begun_s + (num_bytes / path["bytes_s"] if path["bytes_s"] else 0.0)
        return self._free_s + path["delay_s"]


def _device(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22s", name.encode(), _TAP | _NO_INFO, b""))
    return device


def main(near: str, far: str) -> None:
    devices = _device(near), _device(far)
    path = {"delay_s": 0.0, "loss": 0.0, "bytes_s": 0.0}
    directions = {one: _Direction(one, other) for one, other in (devices, devices[::-1])}
    waiting: list[tuple[float, int, int, bytes]] = []  # due, number, device, packet
    number = 0
    poll = select.epoll()
    for descriptor in (0, *devices):
        poll.register(descriptor, select.EPOLLIN)
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else -1
        for descriptor, _ in poll.poll(wait_s):
            if descriptor == 0:
                line = os.read(0, _LARGEST)
                if not line:
                    return
                path = json.loads(line)
                print("ready", flush=True)
                continue
            try:
                packet = os.read(descriptor, _LARGEST)
            except OSError:  # a device that is down, or nothing to read after all
                continue
            number += 1
            due_s = directions[descriptor].due_s(time.monotonic(), len(packet), path)
            if due_s is not None:
                heapq.heappush(waiting, (due_s, number, directions[descriptor].target, packet))
        now_s = time.monotonic()
        while waiting and waiting[0][0] <= now_s:
            _, _, target, packet = heapq.heappop(waiting)
            try:
                os.write(target, packet)
            except OSError:  # a device that is down, or whose queue is full
                continue


if __name__ == "__main__":
    main(*sys.argv[1:])
