"""The curves of gpt-oss, from all rows of a wheel's tables.

The GEMMs of gpt-oss have 2,880 rows or columns, which no table has: their times are interpolated, in logarithms.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import exp, log
from statistics import median
from typing import Any

from oscine.extensions.plan.foreign.ops import OpCurve, OpHeader, OpTable
from oscine.extensions.plan.foreign.wheel import Row, Wheel

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2880, 64, 8, 64, 201_088
RANKS = (1, 2, 4, 8)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
_HEAD_ROWS = 1024  # of the head, at most: those that sample
_MOST_BATCH = 1024
_WINDOW_TOKENS = (1, 16, 64, 128, 256, 1024, 4096, 16384, 65536)
_DISTRIBUTION = "power_law_1.01"  # of tokens over experts
_DENSE = ("bfloat16", "float16")
_W4A8, _W4A16 = "w4a8_mxfp4_mxfp8", "w4a16_mxfp4"
LICENCE = "Apache-2.0, Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES"


def reduced(wheel: Wheel, system: str, framework: str, version: str) -> OpTable:
    """Raises ValueError for what the wheel does not have."""
    constants = wheel.constants(system)

    def rows(op: str) -> list[Row]:
        return wheel.rows(system, op, framework, version)

    attention, experts = rows("generation_attention"), [row for row in rows("moe") if row["hidden_size"] == HIDDEN]
    activations = _W4A8 if any(row["moe_dtype"] == _W4A8 for row in experts) else _W4A16
    experts = [row for row in experts if (row["moe_dtype"], row["distribution"]) == (activations, _DISTRIBUTION)]
    if not attention or not experts:
        known = ", ".join(wheel.versions(system, "generation_attention", framework)) or "none"
        raise ValueError(f"{system} has no experts and attention of gpt-oss for {framework} {version}: it has {known}")
    curves = [
        *_gemms(rows("gemm")),
        *_experts(experts),
        *_decodes(attention),
        *_prefills(rows("context_attention")),
        *_sums(rows("custom_allreduce")),
    ]
    header = OpHeader(
        system=system,
        gpu=str(attention[0]["device"]),
        framework=framework,
        version=version,
        activations=activations,
        source=wheel.name,
        licence=LICENCE,
        sha256=wheel.sha256,
        **constants._asdict(),
        notes=(f"tokens over experts: {_DISTRIBUTION}", "prompts: keys and values in bfloat16"),
    )
    return OpTable(header, tuple(curves))


def _curve(op: str, key: dict[str, Any], points: Iterable[tuple[int, float]]) -> OpCurve:
    """Milliseconds become microseconds; of several times of one size, the median."""
    found: dict[int, list[float]] = defaultdict(list)
    for x, ms in points:
        found[x].append(ms * 1e3)
    return OpCurve(op, key, sorted(found), [float(f"{median(found[x]):.4g}") for x in sorted(found)])


def _gemms(rows: Iterable[Row]) -> Iterator[OpCurve]:
    times: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)  # (n, k) -> m -> ms
    for row in rows:
        if row["gemm_dtype"] in _DENSE:
            times[row["n"], row["k"]][row["m"]] = row["latency"]
    if not times:
        return
    for tp in RANKS:
        heads = (HEADS + 2 * KV_HEADS) * HEAD_DIM // tp
        shapes = {
            "qkv": (heads, HIDDEN),
            "output": (HIDDEN, HEADS * HEAD_DIM // tp),
            "head": (VOCABULARY // tp, HIDDEN),
        }
        if tp == 1:
            shapes["router"] = (128, HIDDEN)
        for name, (n, k) in shapes.items():
            most = _HEAD_ROWS if name == "head" else _ROWS[-1]
            points = ((m, _gemm_ms(times, m, n, k)) for m in _ROWS if m <= most)
            yield _curve("gemm", {"name": name, "tp": tp}, points)


def _gemm_ms(times: dict[tuple[int, int], dict[int, float]], m: int, n: int, k: int) -> float:
    """Between the measured n and k in logarithms; beyond the largest n in proportion."""
    depths: dict[int, list[int]] = defaultdict(list)  # n -> k
    for size_n, size_k in sorted(times):
        depths[size_n].append(size_k)
    columns = sorted(size for size, known in depths.items() if known[0] <= k <= known[-1] and len(known) > 1)

    def at(size_n: int, size_k: int) -> float:
        known = times[size_n, size_k]
        return _in_logs(sorted(known), lambda size: known[size], m)

    def of_depth(size_n: int) -> float:
        return _in_logs(depths[size_n], lambda size_k: at(size_n, size_k), k)

    if columns and n > columns[-1]:
        return of_depth(columns[-1]) * n / columns[-1]
    return _in_logs(columns, of_depth, n)


def _in_logs(sizes: Sequence[int], value: Callable[[int], float], size: int) -> float:
    """Raises ValueError if there is nothing to interpolate between."""
    if len(sizes) < 2:
        raise ValueError("the wheel has too few sizes of GEMMs")
    place = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    low, high = sizes[place - 1], sizes[place]
    share = min(max(log(size / low) / log(high / low), 0.0), 1.0)
    return exp(log(value(low)) * (1 - share) + log(value(high)) * share)


def _experts(rows: Iterable[Row]) -> Iterator[OpCurve]:
    found: dict[tuple[int, int, int], list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        if row["moe_tp_size"] in RANKS:
            key = row["num_experts"], row["moe_tp_size"], row["moe_ep_size"]
            found[key].append((row["num_tokens"], row["latency"]))
    for (experts, tp, ep), points in sorted(found.items()):
        if experts in (32, 128):
            yield _curve("experts", {"experts": experts, "tp": tp, "ep": ep}, points)


def _is_own(row: Row, tp: int) -> bool:
    heads = row["num_heads"], row["num_key_value_heads"], row["head_dim"]
    return heads == (HEADS // tp, KV_HEADS // tp, HEAD_DIM) and row["window_size"] in (0, 128)


def _is_kept(row: Row, tokens: int) -> bool:
    """With a window times are nearly linear in tokens: a part of the rows suffices."""
    return row["batch_size"] <= _MOST_BATCH and (not row["window_size"] or tokens in _WINDOW_TOKENS)


def _decodes(rows: Sequence[Row]) -> Iterator[OpCurve]:
    for tp in RANKS:
        found: dict[tuple[int, str, int], list[tuple[int, float]]] = defaultdict(list)
        for row in rows:
            context = row["step"] + row["isl"]
            if _is_own(row, tp) and _is_kept(row, context) and context >= 64:
                found[row["window_size"], row["kv_cache_dtype"], row["batch_size"]].append((context, row["latency"]))
        for (window, kv, batch), points in sorted(found.items()):
            yield _curve("decode", {"heads": HEADS // tp, "window": window, "kv": kv, "batch": batch}, points)


def _prefills(rows: Sequence[Row]) -> Iterator[OpCurve]:
    for tp in RANKS:
        found: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
        for row in rows:
            if _is_own(row, tp) and _is_kept(row, row["isl"]) and row["kv_cache_dtype"] in _DENSE:
                found[row["window_size"], row["batch_size"]].append((row["isl"], row["latency"]))
        for (window, batch), points in sorted(found.items()):
            yield _curve("prefill", {"heads": HEADS // tp, "window": window, "batch": batch}, points)


def _sums(rows: Iterable[Row]) -> Iterator[OpCurve]:
    """As part of a CUDA graph, where the table tells."""
    found: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        if not str(row.get("backend", "")).endswith("_eager"):
            found[row["num_gpus"]].append((row["message_size"], row["latency"]))
    for gpus, points in sorted(found.items()):
        yield _curve("sum", {"gpus": gpus}, points)
