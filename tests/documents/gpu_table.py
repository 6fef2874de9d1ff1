"""The tables of docs/gpus.md, by the engine's memory plan and the choice of layouts.

`python -m tests.documents.gpu_table` prints them.
"""

from collections.abc import Iterator

from oscine.checkpoint.hub import PUBLISHED
from oscine.cli.serve.options import PROFILES
from oscine.cli.serve.read_options import read_profile
from oscine.executor.kv.fit import plan_on_gpus
from oscine.executor.kv.memory import DeviceMemory, MemoryPlan
from oscine.extensions.timing.gpus import Gpu, Machine
from oscine.extensions.timing.layout import choose
from oscine.extensions.timing.machine import Link
from oscine.settings.config import Config

GIB = 1 << 30
IN_USE = GIB // 2  # by the system and the CUDA context, before the model is loaded
NVLINK, PCIE = Link("NVLink", 1.66e-6, 3.51e11), Link("PCIe", 5e-6, 2.4e10)
FASTER_NVLINK, SLOWER_NVLINK = Link("NVLink", 1.66e-6, 7.0e11), Link("NVLink", 1.66e-6, 2.3e11)
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
# Bandwidth and dense bfloat16 arithmetic as the driver's clocks and widths have them, and how the GPUs are linked.
LINKED = (
    ("H100, NVLink", Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, 80 * GIB - IN_USE, (9, 0), 3.35e12, 1.07e15), NVLINK),
    ("H200, NVLink", Gpu("NVIDIA H200", 141 * GIB, 141 * GIB - IN_USE, (9, 0), 4.92e12, 1.07e15), NVLINK),
    ("B200, NVLink", Gpu("NVIDIA B200", 180 * GIB, 180 * GIB - IN_USE, (10, 0), 8.0e12, 2.3e15), FASTER_NVLINK),
    ("A100 80 GB, NVLink", Gpu("NVIDIA A100", 80 * GIB, 80 * GIB - IN_USE, (8, 0), 2.04e12, 3.1e14), SLOWER_NVLINK),
    ("L40S, PCIe", Gpu("NVIDIA L40S", 48 * GIB, 48 * GIB - IN_USE, (8, 9), 8.6e11, 3.7e14), PCIE),
    ("RTX 4090, no peer access", Gpu("NVIDIA RTX 4090", 24 * GIB, 24 * GIB - IN_USE, (8, 9), 1.01e12, 4.2e14), None),
)
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


def layout(model: str, profile: str, gpu: Gpu, link: Link | None, count: int) -> str:
    """What `oscine serve` chooses, in short; "-" where no layout fits."""
    values = read_profile(profile) | {"profile": profile, "model": f"gpt-oss-{model}"}
    found, why = choose(values, count, Machine((gpu,) * count, link))
    if "estimated" not in why and "peer access" not in why:
        return "-"
    if found.shares_experts:
        return f"EP {count}"
    names = [f"{name} {size}" for name, size in (("DP", found.engines), ("TP", found.ranks)) if size > 1]
    return " x ".join(names)


def layouts_table() -> Iterator[str]:
    columns = [(model, count) for model in ("20b", "120b") for count in RANKS[1:]]
    names = (f"{model} on {count}" for model, count in columns)
    yield f"| GPUs | profile | {' | '.join(names)} |\n|---|---|{'---|' * len(columns)}"
    for name, gpu, link in LINKED:
        for profile in PROFILES:
            cells = (layout(model, profile, gpu, link, count) for model, count in columns)
            yield f"| {name} | `{profile}` | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join((*table(), "", *limits_table(), "", *layouts_table())))
