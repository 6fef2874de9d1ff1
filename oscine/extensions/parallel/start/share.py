"""The lockstep of an engine that shares experts with others: its clock, and an exchange for its device."""

from typing import TYPE_CHECKING

import torch

from oscine.checkpoint.opened import OpenedModel
from oscine.extensions.parallel.clock import StepClock
from oscine.extensions.parallel.comm.collectives import CollectiveCommunicator
from oscine.extensions.parallel.exchange import MemoryExchange
from oscine.extensions.parallel.lockstep import Lockstep
from oscine.extensions.parallel.rendezvous import broadcast, recv_broadcast
from oscine.extensions.parallel.start.communicator import between_gpus
from oscine.ops.target import Exchange
from oscine.settings.config import EngineOptions
from oscine.types import RankHandle

if TYPE_CHECKING:  # it needs Triton, which a CPU does not
    from oscine.extensions.parallel.comm.tokens import SymmetricExchange

_STEP_LIMIT_S = 10.0  # for a rank to come to a step on a GPU; on a CPU a single step may take longer


def open_lockstep(handle: RankHandle, opened: OpenedModel, options: EngineOptions) -> Lockstep:
    """Returns when all ranks have opened theirs, if they are on GPUs."""
    limit_s = _STEP_LIMIT_S if opened.device.type == "cuda" else options.hang_limit_s(on_gpu=False)
    exchange = _between_gpus if opened.device.type == "cuda" else _through_memory
    return Lockstep(StepClock(handle, limit_s), exchange(handle, opened, options))


def _through_memory(handle: RankHandle, opened: OpenedModel, options: EngineOptions) -> Exchange:
    config = opened.config
    row_bytes = config.hidden_size * opened.dtype.itemsize + config.num_experts_per_tok * (8 + 4)  # ids and weights
    limit_s = options.hang_limit_s(on_gpu=False)
    return MemoryExchange(handle, options.scheduler.max_num_batched_tokens, row_bytes, limit_s)


def _between_gpus(handle: RankHandle, opened: OpenedModel, options: EngineOptions) -> "SymmetricExchange":
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from oscine.extensions.parallel.comm.tokens import SymmetricExchange

    if opened.dtype != torch.bfloat16:
        raise ValueError(f"--enable-expert-parallel on GPUs needs --dtype bfloat16, not {opened.dtype}")
    if handle.rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        broadcast(handle, store.port)
    else:
        store = TCPStore("127.0.0.1", recv_broadcast(handle), is_master=False)
    communicator = between_gpus(handle.rank, handle.num_ranks, store, opened, options)
    if isinstance(communicator, CollectiveCommunicator):
        raise ValueError("--enable-expert-parallel needs GPUs that can reach each other's memory, unlike these")
    return SymmetricExchange(communicator)
