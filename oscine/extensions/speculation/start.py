"""Drafts as the options want them: by prompt lookup, or by an EAGLE-3 head."""

from collections.abc import Mapping, Sequence

from oscine.checkpoint.opened import OpenedModel
from oscine.executor.drafts import MakeDrafts, NoDrafts, StepParts
from oscine.executor.kv.memory import most_drafts
from oscine.executor.runner import TorchExecutor
from oscine.executor.start.drafting import Drafting
from oscine.extensions.speculation.eagle.drafter import EagleDrafter
from oscine.extensions.speculation.eagle.find import DraftHead, find_draft_head
from oscine.extensions.speculation.head_drafts import HeadDrafts
from oscine.extensions.speculation.host_drafts import HostDrafts
from oscine.extensions.speculation.lookup import PromptLookup, run_lengths
from oscine.extensions.speculation.ops.table import resolve_draft
from oscine.extensions.speculation.timing import time_decodes
from oscine.kv_group import KVGroup
from oscine.model.gpt_oss import GptOss
from oscine.ops.interface import KVCache
from oscine.ops.platforms.interface import Platform
from oscine.ops.target import Target
from oscine.settings.config import EngineOptions
from oscine.types import DecodeTimes


def drafting_of(
    options: EngineOptions, opened: OpenedModel, target: Target, platform: Platform, alone: bool
) -> Drafting:
    """A MakeDrafting."""
    head = find_draft_head(options, opened, alone=alone)
    if head is None:
        return LookupDrafting(options, opened, alone=alone)
    return HeadDrafting(options, opened, target, platform, head)


class LookupDrafting(Drafting):
    title = "prompt lookup"

    def __init__(self, options: EngineOptions, opened: OpenedModel, *, alone: bool) -> None:
        self.most = most_drafts(options, on_gpu=opened.device.type == "cuda")
        self._options, self._alone = options, alone

    def load(self, model: GptOss, groups: Sequence[KVGroup], kv: KVCache) -> MakeDrafts:
        return lambda parts: HostDrafts(self._drafter(), parts)

    def time(self, executor: TorchExecutor, most_tokens: int) -> Mapping[int, DecodeTimes] | None:
        """On a CPU the time limits decide which steps are measured, so ranks, and engines that share experts, measure
        nothing there."""
        if executor.device.type == "cpu" and not self._alone:
            return None
        return time_decodes(executor, most_tokens, self._drafter())

    def _drafter(self) -> PromptLookup:
        speculation, num_slots = self._options.speculation, self._options.scheduler.max_num_seqs
        return PromptLookup(num_slots, run_lengths(speculation.lookup_min, speculation.lookup_max))


class HeadDrafting(Drafting):
    title, has_head = "EAGLE-3", True

    def __init__(
        self, options: EngineOptions, opened: OpenedModel, target: Target, platform: Platform, head: DraftHead
    ) -> None:
        self.most = most_drafts(options, on_gpu=opened.device.type == "cuda")
        self._options, self._opened, self._head = options, opened, head
        self._target, self._platform = target, platform
        self.shapes = repr(head.opened.config)

    def num_bytes(self, graph_sizes: Sequence[int]) -> int:
        dtype, tokens = self._opened.dtype, self._options.scheduler.max_num_batched_tokens
        return self._head.num_bytes(dtype) + self._head.step_bytes(tokens, graph_sizes, dtype)

    def beside(self, groups: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
        return self._head.beside(groups)

    def load(self, model: GptOss, groups: Sequence[KVGroup], kv: KVCache) -> MakeDrafts:
        head = self._head.load(self._opened, model, resolve_draft(self._target, self._platform))
        group, pages = self._head.pages(groups, kv)
        records = self._platform.has_c_kernels

        def make(parts: StepParts) -> NoDrafts:
            return HeadDrafts(EagleDrafter(head, parts.state, pages, group, records), self.most, parts)

        return make

    def time(self, executor: TorchExecutor, most_tokens: int) -> Mapping[int, DecodeTimes] | None:
        return time_decodes(executor, most_tokens, None)
