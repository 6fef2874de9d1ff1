"""What a page of KV memory is, as engines tell each other, and which bytes move it from one to another.

Plain records and arithmetic: no memory, no transport; nothing here depends on where the bytes are. A page is one block
over all layers of its group, [layers, 2, kv heads, page size, head dim] (docs/decisions/0002). With tensor parallelism
each rank holds it for an equal share of the kv heads, in order, so a page is one block on each rank.
"""

import hashlib
import json
from dataclasses import dataclass, fields
from math import prod
from typing import Literal, NamedTuple

from oscine.model.config import ModelConfig
from oscine.types import PageGroup

MemoryKind = Literal["DRAM", "VRAM"]


@dataclass(frozen=True, slots=True)
class PageLayout:
    """A page of one group, over all ranks. Engines can move pages if everything but the number of ranks is equal."""

    model: str  # name, weights and sizes: what makes equal tokens have equal keys and values
    group: PageGroup
    num_layers: int  # of the group
    num_kv_heads: int  # of a layer, over all ranks
    page_size: int  # tokens
    head_dim: int
    dtype: str
    element_bytes: int
    num_ranks: int = 1  # tensor-parallel size

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_kv_heads % self.num_ranks:
            raise ValueError(f"{self.num_kv_heads} kv heads cannot be shared out among {self.num_ranks} ranks")

    @property
    def heads_per_rank(self) -> int:
        return self.num_kv_heads // self.num_ranks

    @property
    def head_bytes(self) -> int:
        """Of the keys, or the values, of one head and layer: the smallest part that stays in one piece."""
        return self.page_size * self.head_dim * self.element_bytes

    @property
    def rank_bytes(self) -> int:
        """Of a page on one rank."""
        return prod((self.num_layers, 2, self.heads_per_rank, self.head_bytes))

    @property
    def page_bytes(self) -> int:
        """Of a page on all ranks together."""
        return self.rank_bytes * self.num_ranks


def layouts_of(
    model: str, weights: str, config: ModelConfig, page_size: int, dtype: str, element_bytes: int
) -> tuple[PageLayout, PageLayout]:
    """Of the full and of the sliding group of a model that runs on one rank. Of a path only its end names the model,
    as machines may keep it in different places; `weights` tells it from another one there, or another revision."""
    sizes = hashlib.blake2b(json.dumps(config.to_dict(), sort_keys=True).encode(), digest_size=8).hexdigest()
    name = " ".join((model.rstrip("/").rpartition("/")[2], *filter(None, (weights, sizes))))
    heads, dim = config.num_key_value_heads, config.head_dim
    return (
        PageLayout(name, "full", config.num_full_layers, heads, page_size, dim, dtype, element_bytes),
        PageLayout(name, "sliding", config.num_sliding_layers, heads, page_size, dim, dtype, element_bytes),
    )


@dataclass(frozen=True, slots=True)
class Region:
    """The pages of one group on one rank, one after the other."""

    address: int  # of page 0
    num_pages: int


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What one rank lets others read."""

    agent: bytes  # NIXL's metadata: how to reach it, and what it has registered
    kind: MemoryKind
    device: int  # 0 for DRAM
    full: Region
    sliding: Region

    def region(self, group: PageGroup) -> Region:
        return self.full if group == "full" else self.sliding


@dataclass(frozen=True, slots=True)
class KVEndpoint:
    """All that another engine must know to read this one's pages. Holds for one life of its process."""

    full: PageLayout
    sliding: PageLayout
    ranks: list[RankMemory]

    def layout(self, group: PageGroup) -> PageLayout:
        return self.full if group == "full" else self.sliding


class Copy(NamedTuple):
    """Bytes of a page that move in one piece; offsets count from the start of the page on its rank."""

    source_rank: int
    source_offset: int
    target_offset: int
    length: int


class Moves(NamedTuple):
    """Pages of one group: the i-th of the source becomes the i-th of the target."""

    group: PageGroup
    source_pages: list[int]
    target_pages: list[int]


def check_compatible(source: PageLayout, target: PageLayout) -> None:
    """Raises ValueError naming the first difference that keeps pages from moving."""
    for field in fields(PageLayout):
        theirs, ours = getattr(source, field.name), getattr(target, field.name)
        if field.name != "num_ranks" and theirs != ours:
            raise ValueError(f"pages differ in {field.name.replace('_', ' ')}: {theirs} there, {ours} here")


def copies(source: PageLayout, target: PageLayout, target_rank: int) -> list[Copy]:
    """What brings a page to one rank of the target: one piece where both have as many ranks, else one for each layer,
    key or value, and rank that holds some of the heads. Raises ValueError if the layouts are not compatible."""
    check_compatible(source, target)
    if source.num_ranks == target.num_ranks:
        return [Copy(target_rank, 0, 0, target.rank_bytes)]
    first = target_rank * target.heads_per_rank
    found: list[Copy] = []
    for source_rank in range(source.num_ranks):
        source_first = source_rank * source.heads_per_rank
        low = max(first, source_first)
        high = min(first + target.heads_per_rank, source_first + source.heads_per_rank)
        for block in range(2 * target.num_layers if low < high else 0):
            found.append(
                Copy(
                    source_rank,
                    (block * source.heads_per_rank + low - source_first) * source.head_bytes,
                    (block * target.heads_per_rank + low - first) * target.head_bytes,
                    (high - low) * target.head_bytes,
                )
            )
    return found
