"""What host memory and the disk hold of the pages that the cache has evicted, and what each drops first.

Both drop what was used least recently: host memory a page, the disk a whole file. What is being copied is pinned, and
not dropped.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oscine.extensions.offload.page_files import Key


class HostTier:
    """Numbered slots of equal size, each with a page or free."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._pins: Counter[Key] = Counter()

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, key: Key) -> int:
        return self._slots[key]

    def take(self, count: int, may_drop: Callable[[Key], bool]) -> tuple[list[int], list[Key]]:
        """Up to `count` slots to be filled, and the pages that were dropped for them."""
        slots = [self._free.pop() for _ in range(min(count, len(self._free)))]
        dropped: list[Key] = []
        for key in self._slots:
            if len(slots) + len(dropped) == count:
                break
            if key not in self._pins and may_drop(key):
                dropped.append(key)
        return slots + [self._slots.pop(key) for key in dropped], dropped

    def put(self, key: Key, slot: int) -> None:
        """The slot that was taken has got this page."""
        assert key not in self._slots
        self._slots[key] = slot

    def give_back(self, slot: int) -> None:
        """The slot that was taken has got nothing of use."""
        self._free.append(slot)

    def touch(self, key: Key) -> None:
        """The page is dropped after all others."""
        self._slots.move_to_end(key)

    def demote(self, key: Key) -> None:
        """The page is dropped before all others: the cache has it again."""
        self._slots.move_to_end(key, last=False)

    def pin(self, keys: Sequence[Key]) -> None:
        self._pins.update(keys)

    def unpin(self, keys: Sequence[Key]) -> None:
        self._pins -= Counter(keys)


@dataclass(slots=True)
class _File:
    num_bytes: int
    keys: Sequence[Key] = ()  # none while it is being written


class DiskTier:
    """Files with several pages each."""

    def __init__(self) -> None:
        self.num_bytes = 0  # of all files, those being written included
        self.files: OrderedDict[int, _File] = OrderedDict()  # by number; least recently used first
        self._places: dict[Key, tuple[int, int]] = {}
        self._pins: Counter[int] = Counter()

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def __len__(self) -> int:
        """Pages."""
        return len(self._places)

    @property
    def keys(self) -> list[Key]:
        return list(self._places)

    def place(self, key: Key) -> tuple[int, int]:
        """File, and position in it."""
        return self._places[key]

    def begin(self, number: int, num_bytes: int) -> None:
        """A file is being written."""
        self.files[number] = _File(num_bytes)
        self.num_bytes += num_bytes

    def complete(self, number: int, keys: Sequence[Key]) -> None:
        """The file has these pages."""
        self.files[number].keys = keys
        for position, key in enumerate(keys):
            self._places[key] = number, position

    def remove(self, number: int) -> list[Key]:
        """Returns the pages that are lost with the file."""
        file = self.files.pop(number)
        self.num_bytes -= file.num_bytes
        lost = [key for key in file.keys if self._places.get(key, (None,))[0] == number]  # others have a second copy
        for key in lost:
            del self._places[key]
        return lost

    def oldest(self) -> int | None:
        """The file to be removed first; None if all are in use."""
        usable = (number for number, file in self.files.items() if file.keys and number not in self._pins)
        return next(usable, None)

    def touch(self, key: Key) -> None:
        """The file of this page is removed after all others."""
        self.files.move_to_end(self._places[key][0])

    def pin(self, numbers: Sequence[int]) -> None:
        self._pins.update(numbers)

    def unpin(self, numbers: Sequence[int]) -> None:
        self._pins -= Counter(numbers)
