"""The header of a measured table: model, layout, limits, versions, and the state of the machine."""

import ctypes
from dataclasses import replace
from typing import Any

import oscine
from oscine.checkpoint.hub import shapes_of
from oscine.extensions.bench import machine
from oscine.extensions.profile.grid import Limits
from oscine.extensions.timing.gpus import describe_gpus
from oscine.settings.config import Config
from oscine.system.environment import Environment
from oscine.system.nvml import SUCCESS, open_nvml
from oscine.timing.table import Header

_TEMPERATURE, _CLOCK_SM, _CLOCK_MEMORY = 0, 1, 2  # NVML's names
_TEXT_BYTES = 96


def header_of(config: Config, model: str, limits: Limits, where: machine.Machine, kv_filled: str) -> Header:
    """Of one of the engines. Raises ValueError."""
    options, server = config.engine, config.server
    shapes = shapes_of(replace(options.model, device=options.model.device.partition(",")[0]))
    assert shapes is not None, "the engine has read it"
    engines, ranks = server.data_parallel_size, options.model.tensor_parallel_size
    found = describe_gpus(engines * ranks, Environment().visible_gpus) if where.gpu != "cpu" else None
    link = None if found is None or engines * ranks == 1 else found.link
    return Header(
        model=model,
        layers=shapes.num_hidden_layers,
        hidden=shapes.hidden_size,
        gpu=where.gpu,
        source=f"oscine profile, KV cache {kv_filled}",
        bytes_per_s=0.0 if found is None else found.chip.bytes_per_s,
        flops_per_s=0.0 if found is None else found.chip.flops_per_s,
        version=oscine.__version__,
        commit=where.commit,
        num_gpus=engines * ranks,
        tensor_parallel_size=ranks,
        expert_parallel_size=engines,
        link_latency_s=0.0 if link is None else link.latency_s,
        link_bytes_per_s=0.0 if link is None else link.bytes_per_s,
        weights="random" if options.model.random_weights is not None else options.model.model,
        dtype=str(options.model.dtype),
        drafts_by=options.speculation.method if options.speculation.is_on else "",
        kv_cache_dtype=options.cache.kv_cache_dtype,
        activation_dtype=options.model.activation_dtype,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.step_tokens,
        max_model_len=limits.max_model_len,
        page_size=limits.page_size,
        kv_tokens=limits.pages[0] * limits.page_size,
        decode_graphs=limits.graphs.decode,
        prompt_graphs=limits.graphs.prompts,
        packages={"torch": where.torch} | ({} if where.triton is None else {"triton": where.triton}),
        date=where.date,
    )


def state_of(gpus: tuple[str, ...]) -> dict[str, Any]:
    """Driver, and of each GPU degrees, MHz and the limit of watts, as NVML reports them now. {} without NVML."""
    nvml = open_nvml() if gpus else None
    if nvml is None:
        return {}
    version = ctypes.create_string_buffer(_TEXT_BYTES)
    known = nvml.nvmlSystemGetDriverVersion(version, ctypes.c_uint(_TEXT_BYTES)) == SUCCESS
    state: dict[str, Any] = {"driver": version.value.decode()} if known else {}
    state["gpus"] = [_gpu_state(nvml, uuid) for uuid in gpus]
    return state


def _gpu_state(nvml: ctypes.CDLL, uuid: str) -> dict[str, int]:
    device, value = ctypes.c_void_p(), ctypes.c_uint()
    if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) != SUCCESS:
        return {}
    queries = {
        "celsius": (nvml.nvmlDeviceGetTemperature, (ctypes.c_uint(_TEMPERATURE),)),
        "sm_mhz": (nvml.nvmlDeviceGetClockInfo, (ctypes.c_uint(_CLOCK_SM),)),
        "memory_mhz": (nvml.nvmlDeviceGetClockInfo, (ctypes.c_uint(_CLOCK_MEMORY),)),
        "limit_milliwatts": (nvml.nvmlDeviceGetPowerManagementLimit, ()),
    }
    found = {}
    for name, (function, arguments) in queries.items():
        if function(device, *arguments, ctypes.byref(value)) == SUCCESS:
            found[name] = value.value
    return found
