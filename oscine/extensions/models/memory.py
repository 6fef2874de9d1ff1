"""Whether one more model finds room beside those that are loaded, as far as can be known before it is loaded."""

from collections.abc import Callable, Iterable

from oscine.executor.start.host_memory import available_bytes
from oscine.settings.config import CPU_CACHE_BYTES, EngineOptions
from oscine.system.nvml import free_bytes

_GIB = 1 << 30
# In addition to weights and KV cache: prepared forms of the weights, by their share; and workspace, graphs, context.
_PREPARED = 1.15
_WORKSPACE_ON_GPU, _WORKSPACE = 5 * _GIB, _GIB // 4
ASLEEP_ON_GPU = 3 * _GIB  # that an engine keeps there, estimated


class Room:
    def __init__(
        self,
        options: EngineOptions,
        *,
        on_gpu: bool,
        host_bytes: Callable[[], int | None] = available_bytes,
        gpu_bytes: Callable[[Iterable[str]], int | None] = free_bytes,
    ) -> None:
        """`options`: of each engine. `host_bytes` and `gpu_bytes` say what is free: the latter of GPUs by UUID."""
        self._options, self.on_gpu = options, on_gpu
        self._host_bytes, self._gpu_bytes = host_bytes, gpu_bytes

    @property
    def takes_all(self) -> bool:
        """Whether the KV cache of an engine takes whatever a GPU has left, so that no other fits beside it."""
        cache = self._options.cache
        return self.on_gpu and cache.kv_cache_bytes is None and cache.gpu_memory_bytes is None

    def fits(self, weights: int | None, gpus: Iterable[str]) -> bool:
        """Whether a model with so many bytes of weights fits beside the loaded ones. `gpus`: those of the loaded."""
        if self.takes_all or weights is None:
            return False
        free = self._gpu_bytes(gpus) if self.on_gpu else self._host_bytes()
        return free is not None and self._needed(weights) <= free

    def fits_host(self, weights: int | None) -> bool:
        """Whether the host has room for the copy of the weights that a sleeping engine wakes up from."""
        free = self._host_bytes()
        return not self.on_gpu or weights is None or free is None or weights * _PREPARED <= free

    def _needed(self, weights: int) -> int:
        cache = self._options.cache
        if self.on_gpu and cache.gpu_memory_bytes is not None:
            return cache.gpu_memory_bytes
        kv = cache.kv_cache_bytes or CPU_CACHE_BYTES
        return int(weights * _PREPARED) + kv + (_WORKSPACE_ON_GPU if self.on_gpu else _WORKSPACE)
