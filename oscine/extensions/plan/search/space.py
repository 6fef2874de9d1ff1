"""The layouts and limits that a plan may have."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from oscine.extensions.plan.sources.gpus import Gpu
from oscine.extensions.plan.sources.origin import Source

_SIZES = (1, 2, 4, 8)  # ranks that divide the published models, and engines that share experts


@dataclass(frozen=True, slots=True)
class Layout:
    """Of a replica: an engine of some ranks, or engines of a rank each that share experts."""

    gpu: Gpu
    source: Source
    ranks: int = 1
    sharing: int = 1

    @property
    def gpus(self) -> int:
        return self.ranks * self.sharing

    @property
    def per_node(self) -> int:
        """Replicas."""
        return max(1, self.gpu.per_node // self.gpus)

    def __str__(self) -> str:
        shape = f"DP{self.sharing} EP{self.sharing}" if self.sharing > 1 else f"TP{self.ranks}"
        return f"{self.gpu.name} {shape}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout, its number of replicas, and the limits of its engines."""

    layout: Layout
    replicas: int
    max_num_seqs: int  # of an engine
    max_num_batched_tokens: int  # of an engine, or of all that share experts

    @property
    def engines(self) -> int:
        return self.replicas * self.layout.sharing

    @property
    def gpus(self) -> int:
        return self.replicas * self.layout.gpus

    @property
    def limits(self) -> str:
        return f"max-num-seqs {self.max_num_seqs:,}, max-num-batched-tokens {self.max_num_batched_tokens:,}"

    def __str__(self) -> str:
        return f"{self.replicas} x {self.layout}"


def layouts(gpu: Gpu, count: int, sources: Sequence[Source]) -> Iterator[Layout]:
    """Those of up to `count` GPUs of one node."""
    most = min(count, gpu.per_node)
    for source in sources:
        for size in (size for size in _SIZES if size <= most):
            yield Layout(gpu, source, ranks=size)
            if size > 1:
                yield Layout(gpu, source, sharing=size)


def replica_counts(layout: Layout, count: int) -> Sequence[int]:
    """All numbers of replicas; of many, those within some percent of each other."""
    most = count // layout.gpus
    found = [*range(1, min(most, 16) + 1)]
    while found and found[-1] < most:
        found.append(min(most, max(found[-1] + 1, round(found[-1] * 1.15))))
    return found
