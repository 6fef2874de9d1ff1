"""How a step runs: as a CUDA graph of some size, or eagerly. The runner and the tables of step times share this rule.

A decode step (one sampled token per sequence; a draft counts as a sequence) runs in the next larger decode graph. A
step with prompts runs in the next larger prompt graph. All else is eager.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from oscine.timing.features import StepFeatures

# Sequences of a prompt graph. Each costs a tile of attention per key head, most of them empty.
MAX_SEQUENCES = 64
# Tokens that a decode may read in a prompt graph. One program of the attention of prompts reads them all, one block
# after the other.
MAX_CONTEXT = 32768
EAGER = 0


class GraphSizes(NamedTuple):
    """Sizes of captured graphs, ascending."""

    decode: tuple[int, ...] = ()  # rows
    prompts: tuple[int, ...] = ()  # tokens

    def size_of(self, step: StepFeatures) -> int:
        """The size of the graph that runs the step, or EAGER."""
        if step.is_decode and (size := decode_size(self.decode, step.decode_rows)):
            return size
        return prompt_size(self.prompts, step.tokens, step.sequences, step.longest_context)


NO_GRAPHS = GraphSizes()


def decode_size(sizes: Sequence[int], rows: int) -> int:
    """The smallest decode graph that holds so many rows, or EAGER."""
    place = bisect_left(sizes, rows)
    return EAGER if place == len(sizes) else sizes[place]


def prompt_size(sizes: Sequence[int], tokens: int, sequences: int, longest: int) -> int:
    """The smallest prompt graph that holds the step, or EAGER. `longest`: context of a decode in it."""
    place = bisect_left(sizes, tokens)
    return EAGER if place == len(sizes) or sequences > MAX_SEQUENCES or longest > MAX_CONTEXT else sizes[place]
