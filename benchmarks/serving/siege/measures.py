"""What is measured beside an attack: memory, lateness of the event loop, files outside the server's folders."""

import hashlib
import math
import os
from pathlib import Path

from benchmarks.serving.promises import SETTLE_S, require, wait
from benchmarks.serving.server import Server
from benchmarks.serving.siege.verdicts import memory_fault

KEPT_BYTES = 128 << 20  # of the API process, after an attack, and after all attacks together


class Memory:
    """Of the API process: at rest, and its peak since."""

    def __init__(self, server: Server) -> None:
        self._process = Path(f"/proc/{server.pid}")
        self._first_bytes = self._field("VmRSS")
        self.begin()

    def begin(self) -> None:
        """Of the next attack: its memory at rest is that of now, and the peak begins anew."""
        self._rest_bytes = self._field("VmRSS")
        (self._process / "clear_refs").write_text("5")

    def _field(self, name: str) -> int:
        lines = dict(line.split(":", 1) for line in (self._process / "status").read_text().splitlines())
        return int(lines[name].split()[0]) << 10

    def _kept(self) -> int:
        return self._field("VmRSS") - self._rest_bytes

    def judge(self, max_peak_bytes: int) -> tuple[str, str | None]:
        """What was measured, and what is wrong with it."""
        peak = self._field("VmHWM") - self._rest_bytes
        wait(lambda: self._kept() <= KEPT_BYTES, SETTLE_S)
        kept = self._kept()
        return f"memory {peak >> 20:+d} then {kept >> 20:+d} MiB", memory_fault(peak, kept, max_peak_bytes, KEPT_BYTES)

    def after_all(self) -> str:
        """Checks the memory after all attacks together. Raises Broken."""
        self._rest_bytes = self._first_bytes
        wait(lambda: self._kept() <= KEPT_BYTES, SETTLE_S)
        kept = self._kept()
        fault = memory_fault(0, kept, 0, KEPT_BYTES)
        require(fault is None, str(fault))
        return f"{self._first_bytes >> 20} {kept >> 20:+d} MiB"


def lags(server: Server) -> dict[float, float]:
    """By bound in seconds: how often the event loop was late by at most so much, since the server's start."""
    prefix = 'oscine:event_loop_lag_seconds_bucket{le="'
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith(prefix)]
    return {
        math.inf if bound == "+Inf" else float(bound): float(line.rsplit(" ", 1)[1])
        for line in lines
        for bound in [line.removeprefix(prefix).split('"')[0]]
    }


def known_files(folder: Path) -> dict[str, object]:
    """Of each path below a folder of our own: mode, times, and content or target. Links are not followed."""
    found: dict[str, object] = {}
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            stat = path.lstat()
            content: object = None
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_file():
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(folder))] = (stat.st_mode, stat.st_mtime_ns, content)
    return found


def bytes_below(folder: Path) -> int:
    """Of the files in a folder, some of which may vanish meanwhile."""
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += Path(place, name).lstat().st_size
            except FileNotFoundError:
                continue
    return total
