"""Oscine as one end of benchmarks.edge.peer: `python -m benchmarks.edge.ours MODEL CONTEXT SEQUENCES THREADS`."""

import gc
import os
import sys
import time

from benchmarks.edge.peer import serve

_KV_BYTES = 512 << 20  # hold one sequence of 8k tokens of 20b


def main(model: str, context: int, num_seqs: int, threads: int) -> None:
    os.environ |= {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(threads)}  # as in the engine process
    import torch

    from oscine.engine.build import build_engine
    from oscine.extensions.bench.passes import random_prompts
    from oscine.extensions.bench.result import Point
    from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
    from oscine.types import GenerationRequest, SamplingParams

    torch.set_num_threads(threads)
    scheduler = SchedulerOptions(max_num_seqs=num_seqs, max_num_batched_tokens=512, max_waiting=num_seqs)
    options = ModelOptions(model, device="cpu", max_model_len=context)
    cache = CacheOptions(prefix_caching=False, kv_cache_bytes=_KV_BYTES)
    engine = build_engine(EngineOptions(options, cache, scheduler, num_threads=threads))
    gc.collect()
    gc.freeze()

    def run(concurrency: int, isl: int, osl: int) -> list[float]:
        prompts = random_prompts(Point(concurrency, isl, osl), engine.info.vocab_size)
        sampling, num_tokens = SamplingParams(max_tokens=osl, temperature=0.0), dict.fromkeys(range(concurrency), 0)
        times = [time.perf_counter()]
        for number, prompt in enumerate(prompts):
            engine.loop.add(GenerationRequest(str(number), prompt, sampling))
        while engine.loop.has_work:
            for output in engine.loop.step():
                num_tokens[int(output.request_id)] += len(output.token_ids)
            if min(num_tokens.values()) == len(times):
                times.append(time.perf_counter())
        assert len(times) == 1 + osl, "every step gives a token to every sequence"
        return times

    serve(run)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
