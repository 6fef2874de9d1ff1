"""The store of evicted pages for the KV memory of an executor."""

from oscine.config import EngineOptions
from oscine.executor.kv.page_memory import CudaMemory, HostMemory, PageMemory, bytes_of
from oscine.executor.kv.page_store import PageStore, open_store
from oscine.executor.runner import TorchExecutor
from oscine.executor.start.transfer import model_identity


def store_of(options: EngineOptions, executor: TorchExecutor) -> PageStore:
    """Raises ValueError for a folder that cannot be used, or too little memory."""
    model = f"{model_identity(options)} {options.model.cpu_weights if executor.device.type == 'cpu' else 'gpu'}"
    return open_store(options, executor.memory.groups, _memory(executor), model)


def _memory(executor: TorchExecutor) -> PageMemory:
    if executor.device.type == "cuda":
        return CudaMemory(executor.kv)
    return HostMemory([bytes_of(pages).numpy() for pages in executor.kv])
