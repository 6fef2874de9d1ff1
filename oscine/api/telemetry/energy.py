"""The energy counters of the GPUs that compute the models, read at each scrape."""

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from oscine.system.nvml import LIBRARY, EnergyCounter, energy_counters


class EnergyCollector(Collector):
    """No metric where there is no such counter. A GPU that several models use is one sample."""

    def __init__(self, gpus: Callable[[], Iterable[str]], library: str = LIBRARY) -> None:
        """`gpus`: the UUIDs of those that are used now."""
        self._gpus, self._library = gpus, library
        self._uuids: set[str] = set()
        self._counters: list[EnergyCounter] = []
        self._joules: dict[int, float] = {}  # by the number of the GPU

    async def refresh(self) -> None:
        """Reads the counters, in a thread: a GPU that is busy may take milliseconds to answer."""
        if (uuids := {*self._gpus()}) or self._uuids:
            self._joules = await asyncio.to_thread(self._read, uuids)

    def _read(self, uuids: set[str]) -> dict[int, float]:
        if uuids != self._uuids:
            self._uuids, self._counters = uuids, energy_counters(sorted(uuids), self._library)
        found = ((counter.gpu, counter.joules()) for counter in self._counters)
        return {gpu: joules for gpu, joules in sorted(found) if joules is not None}

    def collect(self) -> Iterable[Metric]:
        if not self._joules:
            return
        what = "Energy that a GPU has used since its driver was loaded"
        family = CounterMetricFamily("oscine:energy_joules", what, labels=["gpu"])
        for gpu, joules in self._joules.items():
            family.add_metric([str(gpu)], joules)
        yield family
