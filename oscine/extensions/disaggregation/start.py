"""The transfer of pages between one rank's memory and other engines. Needs NIXL."""

from oscine.checkpoint.folder import fingerprint
from oscine.checkpoint.hub import CONFIG, find_model
from oscine.checkpoint.opened import config_of
from oscine.executor.runner import TorchExecutor
from oscine.extensions.disaggregation.nixl import KVTransfer
from oscine.extensions.disaggregation.transfers import identity_of
from oscine.extensions.speculation.eagle.config import HeadConfig
from oscine.extensions.speculation.eagle.find import head_folder
from oscine.settings.config import EngineOptions
from oscine.types import RankMemory, Region


def transfer_of(options: EngineOptions, executor: TorchExecutor) -> KVTransfer:
    """The transfer for the memory of the executor's rank."""
    device = executor.device
    regions = [Region(pages.data_ptr(), len(pages), pages.stride(0) * pages.itemsize) for pages in executor.kv]
    memory = RankMemory(b"", "VRAM" if device.type == "cuda" else "DRAM", device.index or 0, regions)
    rank = executor.communicator.rank
    return KVTransfer(model_identity(options), executor.memory.groups, memory, rank, local=options.peers.is_local)


def model_identity(options: EngineOptions) -> str:
    """Identifies all that decides the keys and values of given tokens, including those of a draft head."""
    model = options.model
    path = None if model.random_weights else find_model(model)
    weights = "" if path is None else fingerprint(path)
    identity = identity_of(model.random_weights or model.model, weights, config_of(model))
    if options.speculation.method != "eagle3":
        return identity
    head = head_folder(options, path)
    return f"{identity} {fingerprint(head)} {HeadConfig.from_file(head / CONFIG, config_of(model))}"
