"""The table of GPUs in docs/gpus.md, by the engine's memory plan: `python -m tests.documents.gpu_table` prints it."""

from collections.abc import Iterator

from oscine.checkpoint.hub import PUBLISHED
from oscine.config import Config
from oscine.executor.kv.fit import plan_on_gpus
from oscine.executor.kv.memory import DeviceMemory, MemoryPlan

GIB = 1 << 30
IN_USE = GIB // 2  # by the system and the CUDA context, before the model is loaded
GPUS = {  # by memory in GiB
    12: "RTX 3060, RTX 4070",
    16: "RTX 4060 Ti, RTX 4080, RTX 5080",
    24: "RTX 3090, RTX 4090, A10, L4",
    32: "RTX 5090",
    40: "A100 40 GB",
    48: "L40S, RTX 6000 Ada, A40",
    80: "A100, H100",
    96: "RTX PRO 6000, GH200",
    141: "H200",
    180: "B200, GB200",
}
HOPPER = {"H100", "GH200", "H200"}
RANKS = (1, 2, 4, 8)


def plan(model: str, gib: int, num_ranks: int, on_host: str | None = None) -> MemoryPlan:
    """Of each of the ranks. Raises ValueError where the model does not fit."""
    options = Config.of({} if on_host is None else {"experts-on-host": on_host}).engine
    memory, hopper = DeviceMemory(gib * GIB, gib * GIB - IN_USE), bool(HOPPER & set(GPUS[gib].split(", ")))
    return plan_on_gpus(PUBLISHED[model](), options, memory, num_ranks, hopper=hopper)


def cell(model: str, gib: int, num_ranks: int) -> str:
    """The tokens that the KV cache holds."""
    try:
        found = plan(model, gib, num_ranks)
    except ValueError:
        return _with_host(model, gib) if num_ranks == 1 else "-"
    tokens = found.num_pages[0] * found.page_size
    return f"{tokens / 1e6:.1f} M" if tokens >= 1e6 else f"{tokens // 1000} k"


def _with_host(model: str, gib: int) -> str:
    try:
        found = plan(model, gib, 1, "auto")
    except ValueError:
        return "-"
    return f"{found.on_host.num_layers} layers on the host" if found.on_host.num_layers else "-"


def table() -> Iterator[str]:
    of_120b = " | ".join(f"120b on {ranks}" for ranks in RANKS)
    yield f"| memory | GPUs | 20b on 1 | {of_120b} |\n|---|---|---|---|---|---|---|"
    for gib, names in GPUS.items():
        cells = (cell("20b", gib, 1), *(cell("120b", gib, ranks) for ranks in RANKS))
        yield f"| {gib} GB | {names} | {' | '.join(cells)} |"


def limits(model: str, gib: int, num_ranks: int) -> str:
    """The sequences that run at once by default."""
    try:
        return str(plan(model, gib, num_ranks).max_num_seqs)
    except ValueError:
        return "-"


def limits_table() -> Iterator[str]:
    of_120b = " | ".join(f"120b on {ranks}" for ranks in RANKS)
    yield f"| memory | tokens per step | 20b on 1 | {of_120b} |\n|---|---|---|---|---|---|---|"
    for gib in GPUS:
        cells = (limits("20b", gib, 1), *(limits("120b", gib, ranks) for ranks in RANKS))
        yield f"| {gib} GB | {plan('120b', gib, 8).max_num_batched_tokens:,} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join((*table(), "", *limits_table())))
