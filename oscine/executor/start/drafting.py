"""What the start of an executor asks of the extension that drafts."""

from collections.abc import Callable, Mapping, Sequence

from oscine.checkpoint.opened import OpenedModel
from oscine.executor.drafts import MakeDrafts, no_drafts
from oscine.executor.runner import TorchExecutor
from oscine.kv_group import KVGroup
from oscine.model.gpt_oss import GptOss
from oscine.ops.interface import KVCache
from oscine.ops.platforms.interface import Platform
from oscine.ops.target import Target
from oscine.settings.config import EngineOptions
from oscine.types import DecodeTimes


class Drafting:
    """Of a model without drafts, and the base of those with drafts."""

    most = 0  # drafts of a sequence in a step
    title = ""  # what drafts, for the log
    has_head = False  # on the device, beside the model
    shapes = ""  # of a head: what decides which kernels it needs

    def num_bytes(self, graph_sizes: Sequence[int]) -> int:
        """On the device, at most: weights of a head, what steps make for it, and what CUDA graphs of steps of so many
        tokens keep."""
        return 0

    def beside(self, groups: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
        """The page groups of the model, with the layers of a head. Raises ValueError if none suits it."""
        return tuple(groups)

    def load(self, model: GptOss, groups: Sequence[KVGroup], kv: KVCache) -> MakeDrafts:
        """Loads a head onto the device of `model`."""
        return no_drafts

    def time(self, executor: TorchExecutor, most_tokens: int) -> Mapping[int, DecodeTimes] | None:
        """Measures steps with drafts, from which the engine chooses the number of drafts: by number of sequences.

        `most_tokens`: of a step. None if nothing was measured.
        """
        return None


# The last argument: whether the model is on one device and shares no experts. Raises ValueError for a head that is
# missing or does not suit.
MakeDrafting = Callable[[EngineOptions, OpenedModel, Target, Platform, bool], Drafting]
