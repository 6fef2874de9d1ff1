"""Times calls on a device, and measures the ceilings of the device: a copy and a large matrix product."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch

from oscine.extensions.bench.roofline import Ceiling

CALLS = 16  # in one graph, so that its launch does not count
REPLAYS = 7

Call = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Time:
    """Median seconds of a call."""

    seconds: float
    how: Literal["graph", "eager", "cpu"]  # eager: on a GPU, but the call cannot be captured


def time_call(call: Call, device: torch.device, calls: int = CALLS) -> Time:
    """`call(i)` is the i-th of a round of `calls`; together they should touch more memory than the caches hold."""
    if device.type != "cuda":
        return Time(_on_cpu(call, calls), "cpu")
    try:
        graph = capture(call, device, calls)
    except RuntimeError:
        torch.cuda.synchronize(device)
        return Time(_with_events(lambda: _round(call, calls)) / calls, "eager")
    return Time(_with_events(graph.replay) / calls, "graph")


def capture(call: Call, device: torch.device, calls: int) -> torch.cuda.CUDAGraph:
    """A round of calls, after one that is not captured. Raises RuntimeError where it cannot be."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))  # its calls may share counters, or compute inputs
    with torch.cuda.stream(stream):
        _round(call, calls)  # compiles, allocates, and fills caches that do not depend on the call
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        _round(call, calls)
    return graph


def measure_ceiling(device: torch.device) -> Ceiling:
    """A copy kernel, and a matrix product in bfloat16 (float32 on a CPU). Not torch's own copy: in a CUDA graph that is
    not a kernel, and slower.
    """
    gpu = device.type == "cuda"
    source, target = torch.zeros((2, (512 << 20) if gpu else (16 << 20)), dtype=torch.float32, device=device)
    copy = time_call(lambda _: torch.neg(source, out=target), device, calls=2)
    size, dtype = (8192, torch.bfloat16) if gpu else (512, torch.float32)
    matrix = torch.randn((size, size), device=device).to(dtype)
    product = time_call(lambda _: matrix @ matrix, device, calls=2)
    return Ceiling(2 * 4 * source.numel() / copy.seconds, 2 * size**3 / product.seconds)


def _round(call: Call, calls: int) -> None:
    for i in range(calls):
        call(i)


def _with_events(run: Callable[[], None]) -> float:
    """Median seconds of a run; the first is not counted."""
    return median([seconds_on_gpu(run) for _ in range(REPLAYS + 1)][1:])


def seconds_on_gpu(run: Callable[[], None]) -> float:
    """Seconds of the work that one run queues."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _on_cpu(call: Call, calls: int) -> float:
    call(0)
    times = []
    for i in range(max(3, min(calls, REPLAYS))):
        started = time.perf_counter()
        call(i)
        times.append(time.perf_counter() - started)
    return median(times)
