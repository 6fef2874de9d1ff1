"""What a page of keys and values is: the module that knows its shape, its dtype and its bytes.

A page group is the layers of a model that have one window; they share pages. A page is one block over all layers of its
group, [layers, 2 (key, value), KV heads, page size, head size] (docs/decisions/0002). With tensor parallelism each rank
has an equal share of the KV heads, in order; with more ranks than heads, several ranks have the same head. So a page is
one block on each rank. In FP8 a head has more rows than tokens: its last rows are the scales of the others
(docs/decisions/0028). The first group of a model is its full-attention layers: no other group holds more pages of a
sequence.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import lcm, prod

from oscine.kv_dtype import KVDtype

_ALIGNMENT = 128  # bytes; of a page in shared memory, for copies by TMA


def heads_of_rank(num_kv_heads: int, num_ranks: int, rank: int) -> range:
    """An equal share, in order. With more ranks than heads, ranks beside each other have the same head.

    Raises ValueError where shares would not be equal.
    """
    if num_ranks < 1 or (num_kv_heads % num_ranks and num_ranks % num_kv_heads):
        raise ValueError(f"{num_kv_heads} kv heads cannot be shared out among {num_ranks} ranks")
    first = num_kv_heads * rank // num_ranks
    return range(first, first + max(1, num_kv_heads // num_ranks))


def pages_of_window(window: int, page_size: int) -> int:
    """The most pages that the window of one token touches."""
    return -(-(window - 1) // page_size) + 1


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One page group, over all ranks."""

    window: int | None  # tokens that a query sees, its own included; None: all
    layers: tuple[int, ...]  # of the model, ascending
    num_kv_heads: int  # of a layer, over all ranks
    page_size: int  # tokens
    head_dim: int
    dtype: KVDtype  # or its value
    num_ranks: int = 1  # tensor-parallel size

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", KVDtype(self.dtype))  # raises ValueError, as the next
        self.heads_of(0)

    @property
    def name(self) -> str:
        """For people."""
        return "full" if self.window is None else f"window-{self.window}"

    # ---- memory ----

    def heads_of(self, rank: int) -> range:
        return heads_of_rank(self.num_kv_heads, self.num_ranks, rank)

    @property
    def heads_per_rank(self) -> int:
        return len(self.heads_of(0))

    @property
    def holders(self) -> int:
        """Ranks that have the same heads."""
        return max(1, self.num_ranks // self.num_kv_heads)

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Of a page on one rank; the memory of n pages is [n, *page_shape]."""
        return len(self.layers), 2, self.heads_per_rank, self._rows, self.head_dim

    @property
    def _rows(self) -> int:
        return self.dtype.rows(self.page_size, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Of a page on one rank."""
        return prod(self.page_shape) * self.dtype.element_bytes

    @property
    def head_bytes(self) -> int:
        """Of the keys, or the values, of one head and layer in a page: the smallest part that stays in one piece."""
        return self._rows * self.head_dim * self.dtype.element_bytes

    @property
    def layer_token_bytes(self) -> int:
        """Of the key and the value of one token in one layer; each head once."""
        return 2 * self.num_kv_heads * self.head_bytes // self.page_size

    # ---- which pages of a sequence are read ----

    @property
    def window_pages(self) -> int:
        """The most pages that the window of one token touches; only of a group with a window."""
        assert self.window is not None
        return pages_of_window(self.window, self.page_size)

    def most_held(self, num_pages: int) -> int:
        """How many of its `num_pages` pages a sequence holds at most once they are computed."""
        return num_pages if self.window is None else min(num_pages, self.window_pages)

    def decode_pages(self, drafts: bool) -> int:
        """The most pages that a sequence holds while it generates; only of a group with a window.

        A step in flight computes its last token, while the next step takes the page of the token after it. `drafts`
        may need the next page while the first page of the window is still read.
        """
        assert self.window is not None
        return self.window_pages + 1 if drafts else pages_of_window(self.window + 1, self.page_size)

    def first_read(self, num_tokens: int) -> int:
        """The first page that the token after `num_tokens` tokens, or any later one, reads."""
        return 0 if self.window is None else max(0, num_tokens - self.window + 1) // self.page_size

    def first_needed(self, num_pages: int) -> int:
        """The first page that the token after `num_pages` pages, or any later one, reads."""
        return self.first_read(num_pages * self.page_size)


@dataclass(frozen=True, slots=True)
class Slots:
    """Memory that page groups share, in slots of equal size. A slot has pages of one of the groups at a time."""

    groups: tuple[int, ...]  # by their places in the model
    per_slot: tuple[int, ...]  # pages of each that a slot has
    count: int
    slot_bytes: int = 0  # 0: pages are only numbers

    def stride(self, group: int) -> int:
        """Bytes from a page of a group to the next."""
        return self.slot_bytes // self.per_slot[self.groups.index(group)]


def shared(groups: Sequence[KVGroup], count: int = 0) -> Slots:
    """Memory for all groups, in slots of the size at which least of a page is lost, over all groups.

    A slot has one page of the group with the largest pages.
    """
    sizes = [group.page_bytes for group in groups]
    largest = max(sizes)

    def of_size(num_bytes: int) -> Slots:
        per_slot = tuple(num_bytes // size for size in sizes)
        unit = lcm(*per_slot) * _ALIGNMENT
        return Slots(tuple(range(len(groups))), per_slot, count, -(-num_bytes // unit) * unit)

    def loss(slots: Slots) -> float:
        return sum(1 - size / slots.stride(group) for group, size in enumerate(sizes))

    candidates = {size * -(-largest // size) for size in sizes}
    return min(map(of_size, sorted(candidates)), key=loss)


def slots_of(groups: Sequence[KVGroup], slots: Slots, num_seqs: int, num_pages: int, *, drafts: bool = True) -> int:
    """Slots that sequences of so many pages each take at most while they generate. A prompt of several pages, or a
    window that moves on, may need what `drafts` need: one page more in each window."""
    counts = (
        num_pages if groups[group].window is None else min(num_pages, groups[group].decode_pages(drafts))
        for group in slots.groups
    )
    return sum(-(-num_seqs * count // each) for count, each in zip(counts, slots.per_slot, strict=True))


def most_pages(groups: Sequence[KVGroup], memory: Sequence[Slots]) -> int:
    """The most pages of full attention that one sequence can have, beside the windows in the same memory."""
    slots = next(slots for slots in memory if 0 in slots.groups)
    counts = range(1, slots.count * slots.per_slot[0] + 1)
    return bisect_right(counts, slots.count, key=lambda count: slots_of(groups, slots, 1, count))


def apart(num_pages: Sequence[int], groups: Sequence[KVGroup] = ()) -> list[Slots]:
    """Memory of its own for each group; without `groups`, pages are only numbers."""
    sizes = [group.page_bytes for group in groups] or [0] * len(num_pages)
    return [Slots((place,), (1,), *each) for place, each in enumerate(zip(num_pages, sizes, strict=True))]


def check_compatible(source: KVGroup, target: KVGroup) -> None:
    """Raises ValueError naming the first difference that keeps pages from moving; the number of ranks is none."""
    for field in fields(KVGroup):
        theirs, ours = getattr(source, field.name), getattr(target, field.name)
        if field.name != "num_ranks" and theirs != ours:
            raise ValueError(f"pages differ in {field.name.replace('_', ' ')}: {theirs} there, {ours} here")
