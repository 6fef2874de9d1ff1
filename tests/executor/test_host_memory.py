"""The free main memory, read from trees of files like Linux's."""

from pathlib import Path

import pytest

from oscine.executor.start.host_memory import available_bytes

GIB = 1 << 30


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


MACHINE = {"proc/meminfo": f"MemTotal: {32 << 20} kB\nMemAvailable: {20 << 20} kB"}
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MACHINE, 20),
        (MACHINE | {"proc/self/cgroup": "0::/", f"{V2}/memory.max": 8 * GIB, f"{V2}/memory.current": 5 * GIB}, 3),
        (MACHINE | {"proc/self/cgroup": "0::/", f"{V2}/memory.max": "max", f"{V2}/memory.current": 5 * GIB}, 20),
        (MACHINE | {"proc/self/cgroup": "0::/", f"{V2}/memory.max": GIB, f"{V2}/memory.current": 2 * GIB}, 0),
        (
            MACHINE
            | {
                "proc/self/cgroup": "0::/outer/inner",
                f"{V2}/outer/memory.max": 6 * GIB,
                f"{V2}/outer/memory.current": 5 * GIB,
                f"{V2}/outer/memory.stat": f"anon 1\ninactive_file {GIB}",
                f"{V2}/outer/inner/memory.max": "max",
                f"{V2}/outer/inner/memory.current": GIB,
            },
            2,
        ),
        (
            MACHINE
            | {
                "proc/self/cgroup": "4:memory:/docker/abc\n0::/",
                f"{V1}/memory.limit_in_bytes": 4 * GIB,
                f"{V1}/memory.usage_in_bytes": 3 * GIB,
                f"{V1}/memory.stat": f"total_inactive_file {2 * GIB}",
            },
            3,
        ),
        (MACHINE | {"proc/self/cgroup": "3:cpuset:/x", f"{V1}/memory.limit_in_bytes": 1}, 20),
    ],
)
def test_the_least_that_any_of_them_leaves(tmp_path: Path, files: dict[str, object], expected: int | None) -> None:
    left = available_bytes(write(tmp_path, files))
    assert left == (None if expected is None else expected * GIB)


def test_this_machine() -> None:
    left = available_bytes()
    assert left is None or left > 0
