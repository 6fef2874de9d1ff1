"""Runs a given set of requests to their end, for evaluation, benchmarks and tests."""

from collections import deque
from collections.abc import Iterable

from oscine.engine.core.loop import EngineLoop
from oscine.types import GenerationOutput, GenerationRequest


def generate(loop: EngineLoop, requests: Iterable[GenerationRequest]) -> dict[str, list[GenerationOutput]]:
    """All outputs of each request, by request id, in order. Submits as fast as the loop's queue allows."""
    pending = deque(requests)
    outputs: dict[str, list[GenerationOutput]] = {request.request_id: [] for request in pending}
    while pending or loop.has_work:
        while pending and not loop.is_full:
            loop.add(pending.popleft())
        for output in loop.step():
            outputs[output.request_id].append(output)
    return outputs
