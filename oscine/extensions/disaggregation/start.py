"""The transfer of pages between one rank's memory and other engines. Needs NIXL."""

from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from oscine.executor.runner import TorchExecutor
from oscine.executor.start.identity import identity_of, model_identity
from oscine.extensions.disaggregation.kv_link import Transfers
from oscine.extensions.disaggregation.nixl import KVTransfer
from oscine.extensions.disaggregation.of_ranks import RankedTransfers, TransferFollower
from oscine.kv_group import KVGroup
from oscine.model.config import ModelConfig
from oscine.settings.config import EngineOptions
from oscine.types import RankMemory, Region


def transfer_of(options: EngineOptions, executor: TorchExecutor) -> KVTransfer:
    """The transfer for the memory of the executor's rank."""
    device = executor.device
    regions = [Region(pages.data_ptr(), len(pages), pages.stride(0) * pages.itemsize) for pages in executor.kv]
    memory = RankMemory(b"", "VRAM" if device.type == "cuda" else "DRAM", device.index or 0, regions)
    rank = executor.communicator.rank
    return KVTransfer(model_identity(options), executor.memory.groups, memory, rank, local=options.peers.is_local)


def follower_of(options: EngineOptions, executor: TorchExecutor, connection: Connection) -> TransferFollower:
    """Of a rank other than 0. `connection`: to rank 0."""
    return TransferFollower(transfer_of(options, executor), connection)


def transfers_of(options: EngineOptions, executor: TorchExecutor, ranks: Any) -> Transfers:
    """Of all ranks. `executor`: of rank 0. `ranks`: RankProcesses of the others; None if there are none."""
    own = transfer_of(options, executor)
    return own if ranks is None else RankedTransfers(own, ranks.connections, ranks.check)


def fake_transfers_of(
    options: EngineOptions, config: ModelConfig, groups: Sequence[KVGroup], num_pages: int
) -> Transfers:
    """Moves small pages without meaning: one layer of each group, with two bytes for a key and for a value."""
    small = [replace(group, layers=group.layers[:1], num_kv_heads=1, head_dim=2) for group in groups]
    memory = [np.zeros(num_pages * group.page_bytes, np.uint8) for group in small]
    sizes = [group.page_bytes for group in small]
    regions = [Region(pages.ctypes.data, num_pages, size) for pages, size in zip(memory, sizes, strict=True)]
    identity, ours = identity_of(options.model.model, "", config), RankMemory(b"", "DRAM", 0, regions)
    return KVTransfer(identity, small, ours, owner=memory, local=options.peers.is_local)
