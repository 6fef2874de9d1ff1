"""What messages in plain shared memory need: data and then a position are seen by other cores in this order."""

import platform

_ORDERED = ("x86_64", "AMD64")


def require_store_order() -> None:
    """Raises ValueError on a machine that may show stores in another order, as Arm does."""
    if platform.machine() not in _ORDERED:
        raise ValueError(f"ranks, and engines that share experts, need an x86-64 processor, not {platform.machine()}")
