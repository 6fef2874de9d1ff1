"""The memory that all ranks of a model share: slots of their communicator, and the ring of rank 0's messages."""

import mmap

from oscine.extensions.parallel.comm.host import bytes_of
from oscine.extensions.parallel.ring import RING_BYTES


class SharedMemory:
    """It stays mapped as long as a part is used."""

    def __init__(self, descriptor: int, num_ranks: int) -> None:
        """`descriptor`: of bytes_of_all(num_ranks)."""
        memory = memoryview(mmap.mmap(descriptor, bytes_of_all(num_ranks)))
        self.slots, self.ring = memory[:-RING_BYTES], memory[-RING_BYTES:]


def bytes_of_all(num_ranks: int) -> int:
    return bytes_of(num_ranks) + RING_BYTES
