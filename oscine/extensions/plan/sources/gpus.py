"""The kinds of GPUs that can be planned with: those of the shipped tables, by the names that people use."""

from typing import NamedTuple

from oscine.extensions.plan.foreign.ops import shipped_ops
from oscine.settings.option import require

_SYSTEMS = {
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "GB200": "gb200",
    "GB300": "gb300",
    "RTX-PRO-6000": "rtx_pro_6000_server",
}
_HOPPER = {"H20", "H100", "H200", "H800", "GH200"}


class Gpu(NamedTuple):
    """A kind of GPU, and the machine around it."""

    name: str
    system: str  # as AISimulate calls it
    driver: str  # name in the driver
    memory_bytes: int
    per_node: int
    watts: float  # its limit

    @property
    def is_hopper(self) -> bool:
        return is_hopper(self.driver)

    def is_called(self, driver: str) -> bool:
        """Whether a name in the driver is one of this kind of GPU: NVIDIA H100 PCIe is an H100, too."""
        return {*self.name.split("-")} <= {*driver.upper().split()}


def is_hopper(driver: str) -> bool:
    """Whether a GPU has compute capability 9.0, by its name in the driver, such as NVIDIA H100 80GB HBM3."""
    return not _HOPPER.isdisjoint(driver.upper().split())


def gpu_of(name: str, option: str = "gpus") -> Gpu:
    """Raises OptionError for the option that names a GPU of another kind."""
    known = name.upper().replace("_", "-")
    require(known in _SYSTEMS, option, f"of GPUs among {', '.join(_SYSTEMS)}", name)
    header = next(one.header for one in shipped_ops() if one.header.system == _SYSTEMS[known])
    return Gpu(known, header.system, header.gpu, header.memory_bytes, header.gpus_per_node, header.watts)
