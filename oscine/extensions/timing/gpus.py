"""The GPUs that this process may use and the links between them, as NVIDIA's driver describes them.

NVML needs no torch and makes no CUDA context. Memory bandwidth and arithmetic throughput are calculated from clocks,
bus widths and numbers of cores, so that any GPU can be compared with the measured ones.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from oscine.extensions.timing.machine import Chip, Link
from oscine.system.nvml import LIBRARY, SUCCESS, open_nvml

_CLOCK_SM, _CLOCK_MEMORY = 1, 2  # NVML's names of clocks, and of what a GPU can do with another
_READ, _WRITE, _NVLINK = 0, 1, 2
_MAX_LINKS = 18
_NAME_BYTES = 96
# By compute capability: CUDA cores of a multiprocessor, and its dense bfloat16 products per clock.
_CORES = {(8, 0): 64}
_PRODUCTS = {(8, 0): 1024, (9, 0): 2048, (10, 0): 4096, (10, 3): 4096}
_OTHER_CORES, _OTHER_PRODUCTS = 128, 512
# Bytes per second of one NVLink in one direction, by compute capability, and the share that messages reach.
_NVLINK_BYTES = {(8, 0): 25e9, (8, 6): 14e9, (9, 0): 25e9, (10, 0): 50e9, (10, 3): 50e9}
_SHARE = 0.78
_NVLINK_S, _PCIE_S = 1.66e-6, 5e-6  # of a message; the first one is measured
_PCIE_BYTES = {3: 12e9, 4: 24e9, 5: 48e9, 6: 96e9}  # by generation, of 16 lanes; not measured


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total: int  # bytes
    free: int
    capability: tuple[int, int]
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs that serve a model together."""

    gpus: tuple[Gpu, ...]
    link: Link | None  # the slowest between any two GPUs; None without peer access between all of them

    @property
    def chip(self) -> Chip:
        slowest = min(self.gpus, key=lambda gpu: gpu.bytes_per_s)
        return Chip(slowest.name, slowest.bytes_per_s, slowest.flops_per_s)


def describe_gpus(
    count: int | None, visible: str | None, *, peer_access: bool = True, library: str = LIBRARY
) -> Machine | None:
    """The first `count` GPUs, or all. None if there are fewer, or if the driver does not report all figures.

    visible: CUDA_VISIBLE_DEVICES. peer_access: False ignores peer access.
    """
    nvml = open_nvml(library)
    if nvml is None:
        return None
    driver = _Driver(nvml)
    devices = driver.devices(visible)[:count]
    gpus = tuple(gpu for device in devices if (gpu := driver.gpu(device)) is not None)
    if not gpus or len(gpus) != (count or len(devices)):
        return None
    return Machine(gpus, driver.link(devices, gpus) if peer_access else None)


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Driver:
    """Calls of NVML; None or False if the driver does not answer."""

    def __init__(self, nvml: ctypes.CDLL) -> None:
        self._nvml = nvml

    def _read(self, function: str, *arguments: Any) -> int | None:
        value = ctypes.c_uint()
        return value.value if self._call(function, *arguments, ctypes.byref(value)) else None

    def _call(self, function: str, *arguments: Any) -> bool:
        try:
            return bool(getattr(self._nvml, function)(*arguments) == SUCCESS)
        except AttributeError:  # of another version of the driver
            return False

    def devices(self, visible: str | None) -> list[ctypes.c_void_p]:
        """In the order of CUDA_VISIBLE_DEVICES. CUDA may number GPUs of different kinds in another order."""
        count = self._read("nvmlDeviceGetCount_v2") or 0
        names = map(str, range(count)) if visible is None else map(str.strip, visible.split(","))
        return [*self._found(names)]

    def _found(self, names: Iterator[str]) -> Iterator[ctypes.c_void_p]:
        for name in names:
            device = ctypes.c_void_p()
            if name.isdecimal():
                found = self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(name)), ctypes.byref(device))
            else:
                found = self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(device))
            if not found:  # CUDA ignores all that follow
                return
            yield device

    def gpu(self, device: ctypes.c_void_p) -> Gpu | None:
        name, memory = ctypes.create_string_buffer(_NAME_BYTES), _Memory()
        major, minor = ctypes.c_int(), ctypes.c_int()
        known = (
            self._call("nvmlDeviceGetName", device, name, ctypes.c_uint(_NAME_BYTES))
            and self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
            and self._call("nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor))
        )
        width = self._read("nvmlDeviceGetMemoryBusWidth", device)
        cores = self._read("nvmlDeviceGetNumGpuCores", device)
        memory_mhz, sm_mhz = (
            self._read("nvmlDeviceGetMaxClockInfo", device, ctypes.c_uint(clock))
            for clock in (_CLOCK_MEMORY, _CLOCK_SM)
        )
        if not (known and width and cores and memory_mhz and sm_mhz):
            return None
        chip = major.value, minor.value
        products = cores / _CORES.get(chip, _OTHER_CORES) * _PRODUCTS.get(chip, _OTHER_PRODUCTS)
        bytes_per_s = 2 * memory_mhz * 1e6 * width / 8  # two transfers per clock
        return Gpu(name.value.decode(), memory.total, memory.free, chip, bytes_per_s, 2 * products * sm_mhz * 1e6)

    def link(self, devices: Sequence[ctypes.c_void_p], gpus: Sequence[Gpu]) -> Link | None:
        """The slowest link between any two of them; None without peer access between all of them."""

        def all_can(what: int) -> bool:
            pairs = permutations(devices, 2)
            return all(self._read("nvmlDeviceGetP2PStatus", *pair, ctypes.c_int(what)) == SUCCESS for pair in pairs)

        if not (all_can(_READ) and all_can(_WRITE)):
            return None
        if all_can(_NVLINK):
            speeds = (
                self._nvlinks(one) * _NVLINK_BYTES.get(gpu.capability, 25e9)
                for one, gpu in zip(devices, gpus, strict=True)
            )
            return Link("NVLink", _NVLINK_S, _SHARE * min(speeds))
        generations = (self._read("nvmlDeviceGetMaxPcieLinkGeneration", one) for one in devices)
        return Link("PCIe", _PCIE_S, min(_PCIE_BYTES.get(one or 4, _PCIE_BYTES[4]) for one in generations))

    def _nvlinks(self, device: ctypes.c_void_p) -> int:
        """The number of active NVLinks; the maximum if the driver does not report them, as in some virtual machines."""
        states = (self._read("nvmlDeviceGetNvLinkState", device, ctypes.c_uint(i)) for i in range(_MAX_LINKS))
        return sum(state == 1 for state in states) or _MAX_LINKS
