"""Both tiers of an engine, and what its parts share: who copies, who counts, and who is told."""

from collections.abc import Callable, Sequence

from oscine.engine.core.extension import LoopState
from oscine.engine.core.prefix_index import Medium
from oscine.extensions.offload.page_files import Key
from oscine.extensions.offload.page_store import PageStore
from oscine.extensions.offload.rates import Rates
from oscine.extensions.offload.tiers import DiskTier, HostTier

Report = Callable[[str], None]


class Kept:
    def __init__(self, loop: LoopState, store: PageStore, report: Report, clock: Callable[[], float]) -> None:
        self.cache, self.counters, self.store = loop.cache, loop.counters, store
        self.report, self.clock = report, clock
        self.host, self.disk, self.rates = HostTier(store.num_slots), DiskTier(), Rates()

    def tell(self, keys: Sequence[Key], medium: Medium) -> None:
        """The readers of events: a tier has these pages."""
        events = self.cache.index.events
        if events is not None:
            events.offloaded([digest for group, digest in keys if group == 0], medium)

    def told_lost(self, keys: Sequence[Key], medium: Medium) -> None:
        """The readers of events: a tier has them no longer."""
        events = self.cache.index.events
        if events is not None:
            events.removed([digest for group, digest in keys if group == 0], medium)
