"""How a step runs: as a CUDA graph of some size, or eagerly. The runner and the tables of step times share this rule.

A decode step (one sampled token per sequence; a draft counts as a sequence) runs in the next larger decode graph. A
step with prompts runs in the next larger prompt graph. All else is eager.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from oscine.timing.features import StepFeatures

EAGER = 0


class GraphSizes(NamedTuple):
    """Sizes of captured graphs, ascending."""

    decode: tuple[int, ...] = ()  # rows
    prompts: tuple[int, ...] = ()  # tokens
    room: int = 0  # sequences of a prompt graph, at most

    def size_of(self, step: StepFeatures) -> int:
        """The size of the graph that runs the step, or EAGER."""
        if step.is_decode and (size := decode_size(self.decode, step.decode_rows)):
            return size
        return prompt_size(self.prompts, self.room, step.tokens, step.sequences)


NO_GRAPHS = GraphSizes()


def decode_size(sizes: Sequence[int], rows: int) -> int:
    """The smallest decode graph that holds so many rows, or EAGER."""
    place = bisect_left(sizes, rows)
    return EAGER if place == len(sizes) else sizes[place]


def prompt_size(sizes: Sequence[int], room: int, tokens: int, sequences: int) -> int:
    """The smallest prompt graph that holds the step, or EAGER."""
    place = bisect_left(sizes, tokens)
    return EAGER if place == len(sizes) or sequences > room else sizes[place]
