"""A shared library with NVML's functions for energy, compiled here: GPUs whose counters grow with each reading.

GPU-a and GPU-b use 5 J and 20 J between two readings. GPU-old has no counter. The numbers are 0, 1 and 2.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

JOULES = {"GPU-a": 5.0, "GPU-b": 20.0}  # between two readings
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
_SOURCE = """
#include <string.h>
struct gpu { const char *uuid; unsigned number; unsigned long long millijoules, step; };
static struct gpu gpus[] = {
    {"GPU-b", 1, 1ull << 40, 20000}, {"GPU-a", 0, 123456, 5000}, {"GPU-old", 2, 0, 0},
};
int nvmlInit_v2(void) { return STATUS; }
int nvmlDeviceGetHandleByUUID(const char *uuid, struct gpu **device) {
    for (int i = 0; i < 3; i++)
        if (!strcmp(gpus[i].uuid, uuid)) { *device = &gpus[i]; return 0; }
    return 6;  /* not found */
}
int nvmlDeviceGetIndex(struct gpu *device, unsigned *number) { *number = device->number; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(struct gpu *device, unsigned long long *millijoules) {
    if (!device->step) return 3;  /* not supported */
    *millijoules = device->millijoules += device->step;
    return 0;
}
"""


def compile_nvml(folder: Path, status: int = 0) -> str:
    """The path of a library whose nvmlInit_v2 returns `status`."""
    assert COMPILER is not None
    source, library = folder / "nvml.c", folder / f"libnvml{status}.so"
    source.write_text(_SOURCE)
    command = [COMPILER, "-shared", "-fPIC", f"-DSTATUS={status}", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return str(library)
