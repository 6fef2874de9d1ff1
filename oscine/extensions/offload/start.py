"""The store of evicted pages for the KV memory of an executor."""

from collections.abc import Sequence

from oscine.executor.kv.fake_memory import FakePages
from oscine.executor.runner import TorchExecutor
from oscine.executor.start.identity import model_identity
from oscine.extensions.offload.page_memory import CudaMemory, HostMemory, PageMemory, bytes_of
from oscine.extensions.offload.page_store import PageStore, open_store
from oscine.kv_group import KVGroup
from oscine.settings.config import EngineOptions


def store_of(options: EngineOptions, executor: TorchExecutor) -> PageStore:
    """Raises ValueError for a folder that cannot be used, or too little memory."""
    model = f"{model_identity(options)} {options.model.cpu_weights if executor.device.type == 'cpu' else 'gpu'}"
    return open_store(options, executor.memory.groups, _memory(executor), model)


def fake_store_of(options: EngineOptions, groups: Sequence[KVGroup], pages: FakePages) -> PageStore:
    """Of an executor without a model."""
    return open_store(options, groups, HostMemory(pages.memory), "fake")


def _memory(executor: TorchExecutor) -> PageMemory:
    if executor.device.type == "cuda":
        return CudaMemory(executor.kv)
    return HostMemory([bytes_of(pages).numpy() for pages in executor.kv])
