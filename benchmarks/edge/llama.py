"""llama.cpp as one end of benchmarks.edge.peer, in its own environment.

`python llama.py MODEL CONTEXT SEQUENCES THREADS`. Through its C interface: prompts and steps are batches with a token
of each sequence, sampled greedily, as in its server.
"""

import ctypes
import random
import sys
import time

import llama_cpp as c
from peer import serve

_BATCH = 512  # tokens computed at once, as in Oscine's engine here


class Sequences:
    """Sequences that are computed together."""

    def __init__(self, model: "c.llama_model_p", context: int, count: int, threads: int) -> None:
        params = c.llama_context_default_params()
        params.n_ctx, params.n_seq_max = max(context, 256 * count), count
        params.n_batch = params.n_ubatch = _BATCH
        params.n_threads = params.n_threads_batch = threads
        params.swa_full, params.no_perf = False, True
        self.context, self.count = c.llama_init_from_model(model, params), count
        if not self.context:
            raise SystemExit("llama.cpp made no context")
        self.sampler = c.llama_sampler_init_greedy()
        self.batch = c.llama_batch_init(_BATCH, 0, 1)

    def close(self) -> None:
        c.llama_batch_free(self.batch)
        c.llama_sampler_free(self.sampler)
        c.llama_free(self.context)

    def prompt(self, prompts: list[list[int]]) -> list[int]:
        """Computes the prompts. Returns the first token of each sequence."""
        tokens = [
            (token, place, number, place == len(prompt) - 1)
            for number, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        found: list[int] = []
        for start in range(0, len(tokens), _BATCH):
            found += self.step(tokens[start : start + _BATCH])
        return found

    def step(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Computes a batch of (token, position, sequence, whether to sample after it). Returns the sampled tokens."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for row, (token, position, number, sampled) in enumerate(tokens):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, number
            batch.logits[row] = sampled
        if c.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp could not compute a batch")
        rows = [row for row, (*_, sampled) in enumerate(tokens) if sampled]
        return [c.llama_sampler_sample(self.sampler, self.context, row) for row in rows]


def main(path: str, context: int, _num_seqs: int, threads: int) -> None:
    quiet = c.llama_log_callback(lambda *_: None)
    c.llama_log_set(quiet, ctypes.c_void_p(0))
    c.llama_backend_init()
    model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp could not load {path}")
    vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))

    last: list[Sequences] = []  # kept until the next load, so that its memory can be asked for

    def run(concurrency: int, isl: int, osl: int) -> list[float]:
        if last:
            last.pop().close()
        generator = random.Random(f"{concurrency} {isl}")  # the same prompts as Oscine's
        prompts = [generator.choices(range(vocabulary), k=isl) for _ in range(concurrency)]
        last.append(sequences := Sequences(model, context, concurrency, threads))
        times = [time.perf_counter()]
        tokens = sequences.prompt(prompts)
        for position in range(isl, isl + osl):
            times.append(time.perf_counter())
            if len(times) <= osl:
                tokens = sequences.step([(token, position, i, True) for i, token in enumerate(tokens)])
        return times

    serve(run)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
