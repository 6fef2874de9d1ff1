"""The devices, and the share of a machine, that each of several engines or ranks gets."""

from dataclasses import replace

from oscine.settings.config import (
    CPU_CACHE_BYTES,
    MAX_STEP_TOKENS,
    Config,
    EngineOptions,
    PeerOptions,
    SchedulerOptions,
)
from oscine.settings.option import OptionError
from oscine.system.cores import default_threads


def devices_of(device: str, num_engines: int, num_ranks: int, num_gpus: int) -> list[list[str]]:
    """The devices of each engine's ranks: the CPU, the first GPUs, or the devices that `device` lists.

    For several engines or ranks. Raises OptionError.
    """
    count = num_engines * num_ranks
    sizes = {"data-parallel-size": num_engines, "tensor-parallel-size": num_ranks}
    given = [name for name, size in sizes.items() if size > 1]
    if device == "cpu" or (device == "auto" and not num_gpus):
        names = ["cpu"] * count
    elif device in ("auto", "cuda"):
        product = "".join(f"times --{name} " for name in given[1:])
        if num_gpus < count:
            rule = f"{product}must be at most the number of GPUs ({num_gpus}), not {count}"
            raise OptionError(given[0], rule, *given[1:])
        names = [f"cuda:{i}" for i in range(count)]
    else:
        names = [part if ":" in part else f"cuda:{part}" for part in device.split(",")]
        if len(names) != count:
            product = " times ".join(f"--{name} ({sizes[name]})" for name in given)
            raise OptionError("device", f"must name as many devices as {product}, not {device!r}", *given)
    return [names[start : start + num_ranks] for start in range(0, count, num_ranks)]


def engines_of(config: Config, num_gpus: int) -> list[EngineOptions]:
    """The options of each engine of --data-parallel-size. Raises ValueError."""
    count, engine = config.server.data_parallel_size, config.engine
    num_ranks = engine.model.tensor_parallel_size
    if engine.peers != PeerOptions():
        raise ValueError("--kv-events-config publishes the events of one engine: --data-parallel-size must be 1")
    devices = devices_of(engine.model.device, count, num_ranks, 0 if engine.executor == "fake" else num_gpus)
    on_cpu = devices[0][0] == "cpu"
    if on_cpu or engine.model.experts_on_host is not None:
        engine = replace(engine, num_threads=max(1, (engine.num_threads or default_threads()) // count))
    if on_cpu:
        size = (engine.cache.kv_cache_bytes or CPU_CACHE_BYTES) // count
        engine = replace(engine, cache=replace(engine.cache, kv_cache_bytes=size))
    if engine.cache.kv_offload_bytes:
        disk, host = engine.cache.kv_offload_disk_bytes // count, engine.cache.kv_offload_bytes // count
        engine = replace(engine, cache=replace(engine.cache, kv_offload_bytes=host, kv_offload_disk_bytes=disk))
    if config.server.enable_expert_parallel:
        if engine.model.tensor_parallel_size > 1:
            raise ValueError("--enable-expert-parallel needs engines of one rank: --tensor-parallel-size must be 1")
        engine = replace(engine, scheduler=_part_of_step(engine.scheduler, count, on_cpu=on_cpu))
    return [
        replace(engine, model=replace(engine.model, device=",".join(dict.fromkeys(own))), quiet=engine.quiet or i > 0)
        for i, own in enumerate(devices)
    ]


def _part_of_step(scheduler: SchedulerOptions, count: int, *, on_cpu: bool) -> SchedulerOptions:
    """The experts of each engine compute the tokens of all: a step of the group has no more tokens than one engine's.

    So a prompt of one engine delays the sequences of the others no longer than a prompt of their own would.
    Engines on GPUs need the number before they meet, so it cannot follow from their memory.
    """
    left = "max_num_batched_tokens" in scheduler.by_memory and not on_cpu
    tokens = MAX_STEP_TOKENS if left else scheduler.max_num_batched_tokens
    share = max(tokens // count, scheduler.max_num_seqs)
    by_memory = tuple(field for field in scheduler.by_memory if field != "max_num_batched_tokens")
    return replace(scheduler, max_num_batched_tokens=share, by_memory=by_memory)
