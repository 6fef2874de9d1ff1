"""Opens NVML, the library of NVIDIA's driver, and reads its counter of energy, and free memory. Nothing is sampled.

The counter grows since the driver was loaded. Volta and newer GPUs have it; a part of a GPU (MIG) has none.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"  # of the driver
SUCCESS = 0


@dataclass(frozen=True, slots=True)
class EnergyCounter:
    """Of one GPU."""

    gpu: int  # its number in nvidia-smi
    _library: ctypes.CDLL
    _device: ctypes.c_void_p

    def joules(self) -> float | None:
        """None if the GPU has no such counter, or is lost."""
        millijoules = ctypes.c_ulonglong()
        status = self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules))
        return millijoules.value / 1e3 if status == SUCCESS else None


def energy_counters(uuids: Iterable[str], library: str = LIBRARY) -> list[EnergyCounter]:
    """A counter per GPU with one of these UUIDs ("GPU-...") that can be read; none on a machine without NVML."""
    names = [*uuids]
    if not names:
        return []
    nvml = open_nvml(library)
    if nvml is None:
        return []
    found = (_counter(nvml, name) for name in names)
    return [counter for counter in found if counter is not None and counter.joules() is not None]


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_bytes(uuids: Iterable[str], library: str = LIBRARY) -> int | None:
    """The least free memory of these GPUs; None if one of them, or none, can be asked."""
    found: list[int] = []
    nvml = open_nvml(library)
    for name in dict.fromkeys(uuids) if nvml is not None else ():
        assert nvml is not None
        device, memory = ctypes.c_void_p(), _Memory()
        if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device)) != SUCCESS:
            return None
        if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != SUCCESS:
            return None
        found.append(memory.free)
    return min(found, default=None)


def open_nvml(library: str = LIBRARY) -> ctypes.CDLL | None:
    """None if there is no driver, or it does not answer."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    return nvml if nvml.nvmlInit_v2() == SUCCESS else None


def _counter(nvml: ctypes.CDLL, uuid: str) -> EnergyCounter | None:
    device, number = ctypes.c_void_p(), ctypes.c_uint()
    if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) != SUCCESS:
        return None
    if nvml.nvmlDeviceGetIndex(device, ctypes.byref(number)) != SUCCESS:
        return None
    return EnergyCounter(number.value, nvml, device)


class Energy:
    """What several GPUs use together."""

    def __init__(self, uuids: Iterable[str], library: str = LIBRARY) -> None:
        names = [*uuids]
        counters = energy_counters(names, library)
        self._counters = counters if len(counters) == len(names) else []  # a part of the sum would be wrong

    def joules(self) -> float | None:
        """Since a fixed time in the past. None without a counter of each GPU."""
        found = [counter.joules() for counter in self._counters]
        known = [joules for joules in found if joules is not None]
        return sum(known) if known and len(known) == len(found) else None
