"""Random loads at all limits of an engine on a GPU. After the start, no allocation and no request may fail.

    python -m benchmarks.memory --random-weights 120b --seconds 480
    python -m benchmarks.memory --random-weights 20b --starts 10 --beside 2 --seconds 5
    python -m benchmarks.memory --random-weights 20b --gpu-memory-bytes 24 --seconds 20

The engine has the default limits of `oscine serve`. The load alternates between kinds: prompts as long as the context
allows, full batches of short ones, log-probabilities of prompts and answers, all ways of sampling, grammars,
repetitive prompts that have many drafts, and all of them at once. One request in ten is cancelled. A grammar may use
the embedded model's tokens. --starts N starts the engine N times, each time in a new process, beside a process that
holds --beside GiB. A start that is refused must say why in one line. Exits with 1 if anything failed.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from oscine.checkpoint.hub import NANO_FOLDER
from oscine.engine.build import BuiltEngine, build_engine
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions, SpeculationOptions
from oscine.types import GenerationRequest, SamplingParams

GIB = 1 << 30
LETTERS = '%llguidance {"no_forcing": true}\nstart: /[a-z ]{20,4000}/'
NUM_BIASES = 300
CANCELLED = 0.1  # of all requests
PHASE_S = 25.0
HOLD = """
import sys, torch
kept = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("ready", flush=True)
sys.stdin.read()
"""


@dataclass
class Outcome:
    """The outcome of all phases."""

    ended: Counter[str] = field(default_factory=Counter)  # by kind and reason
    errors: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    least_free: int = 1 << 62  # bytes of the GPU, at any sample
    slots: tuple[int, int] = (0, 0)  # the most in use, and the total


class Load:
    """Makes requests, all from one `seed`."""

    def __init__(self, engine: BuiltEngine, seed: int) -> None:
        self._random, self._vocab, self._engine = random.Random(seed), engine.info.vocab_size, engine
        self._longest, self._batch = engine.info.max_model_len, engine.info.max_num_seqs
        self._step = engine.info.max_num_batched_tokens
        self._count = 0

    def phase(self, kind: str) -> Iterator[GenerationRequest]:
        """Yields requests forever."""
        make = {
            "long": self._long,
            "full": self._full,
            "logprobs": self._logprobs,
            "sampled": self._sampled,
            "grammar": self._grammar,
            "drafts": self._drafts,
        }
        while True:
            name = self._random.choice([*make]) if kind == "mixed" else kind
            self._count += 1
            prompt, sampling = make[name]()
            yield GenerationRequest(f"{name}-{self._count}", prompt, sampling)

    def most(self, kind: str) -> int:
        """The number of requests at once."""
        return {"long": 4, "logprobs": self._batch // 2 + 1}.get(kind, self._batch + self._batch // 8)

    def _prompt(self, least: int, most: int) -> list[int]:
        return self._random.choices(range(self._vocab), k=self._random.randint(least, max(least, most)))

    def _long(self) -> tuple[list[int], SamplingParams]:
        return self._prompt(self._longest // 4, self._longest - 200), SamplingParams(32, temperature=0.0)

    def _full(self) -> tuple[list[int], SamplingParams]:
        return self._prompt(1, 3000), SamplingParams(self._random.randint(16, 600), temperature=0.0)

    def _logprobs(self) -> tuple[list[int], SamplingParams]:
        of_prompt = 20 if self._random.random() < 0.3 else None
        return self._prompt(1, self._step if of_prompt else 500), SamplingParams(
            40, temperature=0.7, top_p=0.9, logprobs=20, prompt_logprobs=of_prompt
        )

    def _sampled(self) -> tuple[list[int], SamplingParams]:
        draw = self._random
        biased = draw.sample(range(self._vocab), min(NUM_BIASES, self._vocab)) if draw.random() < 0.3 else []
        return self._prompt(1, 1000), SamplingParams(
            draw.randint(16, 200),
            temperature=draw.choice([0.0, 0.5, 1.0, 2.0]),
            top_p=draw.choice([1.0, 0.9, 0.1]),
            top_k=draw.choice([0, 1, 50, 1000]),
            min_p=draw.choice([0.0, 0.05]),
            presence_penalty=draw.choice([0.0, 1.0]),
            frequency_penalty=draw.choice([0.0, 0.5]),
            repetition_penalty=draw.choice([1.0, 1.2]),
            logit_bias={token: draw.uniform(-5, 5) for token in biased},
            logprobs=draw.choice([None, 0, 20]),
            seed=draw.randrange(1 << 30),
        )

    def _grammar(self) -> tuple[list[int], SamplingParams]:
        return self._prompt(1, 500), SamplingParams(
            120, temperature=self._random.choice([0.0, 1.0]), grammar=LETTERS, top_p=self._random.choice([1.0, 0.9])
        )

    def _drafts(self) -> tuple[list[int], SamplingParams]:
        return self._prompt(8, 40) * 12, SamplingParams(200, temperature=0.0, logit_bias={7: 100.0})


def torture(engine: BuiltEngine, seconds: float, seed: int, outcome: Outcome) -> None:
    """Raises what the executor raises."""
    load, draw, end_s = Load(engine, seed), random.Random(seed + 1), time.monotonic() + seconds
    kinds = ["long", "full", "logprobs", "sampled", "grammar", "drafts", "mixed"]
    phase_s = min(PHASE_S, seconds / len(kinds))
    while time.monotonic() < end_s:
        draw.shuffle(kinds)
        for kind in kinds:
            run_phase(engine, load, kind, min(time.monotonic() + phase_s, end_s), draw, outcome)


def run_phase(engine: BuiltEngine, load: Load, kind: str, end_s: float, draw: random.Random, outcome: Outcome) -> None:
    loop, requests, live = engine.loop, load.phase(kind), set[str]()
    before = loop.counters.generated_tokens
    while loop.has_work or time.monotonic() < end_s:
        is_over = time.monotonic() >= end_s
        while not is_over and len(live) < load.most(kind) and not loop.is_full:
            request = next(requests)
            live.add(request.request_id)
            loop.add(request)
        for name in sorted(live) if is_over else ():
            loop.cancel(name)
        for output in loop.step():
            if output.finish_reason is not None:
                live.discard(output.request_id)
                if live and draw.random() < CANCELLED:  # one for every ten that end
                    loop.cancel(draw.choice(sorted(live)))
                outcome.ended[f"{output.request_id.split('-')[0]}: {output.finish_reason}"] += 1
                if output.error is not None:
                    outcome.errors[output.error] += 1
        stats = loop.stats()
        outcome.slots = max(outcome.slots, (stats.kv_slots_used, stats.kv_slots_total))
        outcome.least_free = min(outcome.least_free, free_bytes()[0])
    if live:
        outcome.errors[f"{kind}: requests without an end"] += len(live)
    outcome.tokens += loop.counters.generated_tokens - before


def free_bytes() -> tuple[int, int]:
    """Free and total bytes of the GPU."""
    return torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)


def options(args: argparse.Namespace) -> EngineOptions:
    limits = {"max-num-seqs": args.max_num_seqs, "max-num-batched-tokens": args.max_num_batched_tokens}
    given = {name: value for name, value in limits.items() if value is not None}
    of_gpu = None if args.gpu_memory_bytes is None else int(args.gpu_memory_bytes * GIB)
    return EngineOptions(
        ModelOptions(
            random_weights=args.random_weights,
            tokenizer=str(NANO_FOLDER),
            device=args.device,
            max_model_len=args.max_model_len,
            experts_on_host=args.experts_on_host,
        ),
        CacheOptions(kv_cache_dtype=args.kv_cache_dtype, gpu_memory_bytes=of_gpu),
        SchedulerOptions.of(given),
        speculation=SpeculationOptions("ngram" if args.drafts else "none"),
    )


def once(args: argparse.Namespace) -> dict[str, Any]:
    began_s = time.monotonic()
    try:
        engine = build_engine(options(args))
    except ValueError as error:
        return {"refused": str(error), "errors": {"a reason of several lines": 1} if "\n" in str(error) else {}}
    outcome, ready_s = Outcome(), time.monotonic() - began_s
    free, total = free_bytes()
    try:
        torture(engine, args.seconds, args.seed, outcome)
    except Exception as error:  # the executor's: memory, or a kernel
        outcome.errors[f"{type(error).__name__}: {str(error).splitlines()[0]}"] += 1
    stats = engine.loop.stats()
    return {
        "ready_s": round(ready_s, 1),
        "max_model_len": engine.info.max_model_len,
        "max_num_seqs": engine.info.max_num_seqs,
        "max_num_batched_tokens": engine.info.max_num_batched_tokens,
        "kv_slots": stats.kv_slots_total,
        "most_slots_used": outcome.slots[0],
        "used_gib_when_ready": round((total - free) / GIB, 2),
        "least_free_gib": round(outcome.least_free / GIB, 2),
        "tokens": outcome.tokens,
        "preemptions": stats.preemptions,
        "accepted_drafts": stats.accepted_tokens,
        "ended": dict(sorted(outcome.ended.items())),
        "errors": dict(outcome.errors),
    }


def starts(args: argparse.Namespace, given: list[str]) -> bool:
    """Returns whether nothing failed."""
    command = [sys.executable, "-m", "benchmarks.memory", *given, "--starts", "0"]
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(int(args.beside * GIB))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        ended = [subprocess.run([*command, "--seed", str(seed)], check=False) for seed in range(args.starts)]
        holder.kill()
    print(f"{sum(one.returncode == 0 for one in ended)} of {len(ended)} starts went well")
    return not any(one.returncode for one in ended)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random-weights", help="20b or 120b (default: the embedded model)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--gpu-memory-bytes", type=float, help="GiB that the engine may use")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--experts-on-host")
    parser.add_argument("--drafts", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--starts", type=int, default=0)
    parser.add_argument("--beside", type=float, default=2.0, help="GiB that another process holds meanwhile")
    args = parser.parse_args()
    if args.starts:
        sys.exit(not starts(args, sys.argv[1:]))
    found = once(args)
    print(json.dumps(found, indent=1))
    sys.exit(bool(found.get("errors")))


if __name__ == "__main__":
    main()
