"""Shared libraries with functions of NVML, compiled here.

compile_nvml: GPUs whose energy counters grow with each reading. GPU-a and GPU-b use 5 J and 20 J between two readings.
GPU-old has no counter. The numbers are 0, 1 and 2.

compile_h100: four H100, GPU-0 to GPU-3, as their driver describes them.
"""

import shutil
import subprocess
from collections.abc import Mapping
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

_H100 = """
#include <stdio.h>
#include <string.h>
static int devices[] = {0, 1, 2, 3};
struct memory { unsigned long long total, free, used; };
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 4; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, int **device) { *device = &devices[i]; return i < 4 ? 0 : 6; }
int nvmlDeviceGetHandleByUUID(const char *uuid, int **device) {
    int i = -1;
    return sscanf(uuid, "GPU-%d", &i) == 1 && i < 4 ? nvmlDeviceGetHandleByIndex_v2(i, device) : 6;
}
int nvmlDeviceGetName(int *device, char *name, unsigned size) { strcpy(name, "NVIDIA H100 80GB HBM3"); return 0; }
int nvmlDeviceGetMemoryInfo(int *device, struct memory *memory) {
    memory->total = 80ull << 30; memory->free = (79ull << 30) - *device;  /* so devices differ */
    return MEMORY_STATUS;
}
int nvmlDeviceGetCudaComputeCapability(int *device, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetMemoryBusWidth(int *device, unsigned *bits) { *bits = 5120; return 0; }
int nvmlDeviceGetNumGpuCores(int *device, unsigned *cores) { *cores = 132 * 128; return 0; }
int nvmlDeviceGetMaxClockInfo(int *device, unsigned clock, unsigned *mhz) { *mhz = clock == 2 ? 2619 : 1980; return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(int *device, unsigned *number) { *number = 5; return 0; }
int nvmlDeviceGetNvLinkState(int *device, unsigned link, unsigned *active) { *active = link < 18; return LINK_STATUS; }
int nvmlDeviceGetP2PStatus(int *one, int *other, int what, unsigned *status) {
    *status = what == 2 ? NVLINK : PEER;  /* 0 is yes; GPU-3 is alone in any case */
    if (*one == 3 || *other == 3) *status = 1;
    return *one == *other;  /* a GPU is no peer of itself */
}
"""


def compile_h100(
    folder: Path, *, peer: bool = True, nvlink: bool = True, links: bool = True, memory: bool = True
) -> str:
    """links, memory: whether the driver tells the state of NVLinks and the size of the memory."""
    values = {
        "PEER": not peer,
        "NVLINK": not nvlink,
        "LINK_STATUS": 0 if links else 3,
        "MEMORY_STATUS": 0 if memory else 3,
    }
    return _compile(folder, f"h100-{peer}-{nvlink}-{links}-{memory}", _H100, values)


def compile_nvml(folder: Path, status: int = 0) -> str:
    """The path of a library whose nvmlInit_v2 returns `status`."""
    return _compile(folder, f"nvml{status}", _SOURCE, {"STATUS": status})


def _compile(folder: Path, name: str, code: str, values: Mapping[str, int]) -> str:
    assert COMPILER is not None
    source, library = folder / f"{name}.c", folder / f"lib{name}.so"
    source.write_text(code)
    defined = [f"-D{name}={int(value)}" for name, value in values.items()]
    subprocess.run([COMPILER, "-shared", "-fPIC", *defined, "-o", str(library), str(source)], check=True)
    return str(library)
