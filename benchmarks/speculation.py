"""Drafts on the embedded model: one stream, with and without drafts in turns, over held-out cases of its skills.

    python -m benchmarks.speculation
    python -m benchmarks.speculation --only JSON --only recall --cases 5 --output benchmarks/results/speculation.jsonl

Both engines run in this process and get the same requests, one after the other. Exits with 1 if an answer differs.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from oscine.engine.build import build_engine
from oscine.engine.core.loop import EngineLoop
from oscine.extensions.bench.machine import describe
from oscine.settings.config import EngineOptions, ModelOptions, SpeculationOptions
from oscine.types import GenerationRequest, SamplingParams
from training.evaluate import MAX_TOKENS, NANO, SKILLS, Skill
from training.packing import Encoder
from training.split import Draw

SEED = 20_000_000  # of cases, apart from those of `make eval`


@dataclass
class Measured:
    """Answers of one engine."""

    seconds: float = 0.0
    tokens: list[list[int]] = field(default_factory=list)
    steps: int = 0

    @property
    def speed(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def engine(method: str, max_drafts: int | None = None) -> EngineLoop:
    speculation = SpeculationOptions(method, max_drafts)  # type: ignore[arg-type]
    return build_engine(EngineOptions(ModelOptions(str(NANO)), speculation=speculation, quiet=True)).loop


def ask(loop: EngineLoop, prompt: list[int], sampling: SamplingParams, measured: Measured) -> None:
    """The time counts from the first token to the last."""
    first_s = last_s = 0.0
    tokens: list[int] = []
    steps = 0
    loop.add(GenerationRequest("one", prompt, sampling))
    while loop.has_work:
        outputs = loop.step()
        for output in outputs:
            if not tokens:
                first_s, steps = time.perf_counter(), loop.counters.steps
            tokens += output.token_ids
            last_s = time.perf_counter()
    measured.seconds += last_s - first_s
    measured.steps += loop.counters.steps - steps
    measured.tokens.append(tokens[1:])


def measure(skill: Skill, engines: list[EngineLoop], encoder: Encoder, cases: int, seed: int = SEED) -> list[Measured]:
    """One stream on each engine, case by case in turns."""
    found = [Measured() for _ in engines]
    greedy = SamplingParams(MAX_TOKENS, temperature=0.0, stop_token_ids=encoder.tokenizer.turn_end_ids)
    for i in range(cases):
        made = skill.make(Draw(seed + i, held_out=True))
        sampling = replace(greedy, grammar=skill.grammar(made))
        order = list(zip(engines, found, strict=True))
        for loop, measured in order if i % 2 else order[::-1]:
            ask(loop, encoder.prompt(made), sampling, measured)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="only skills whose names contain this (more than once: any)")
    parser.add_argument("--cases", type=int, default=10, help="per skill (default: %(default)s)")
    parser.add_argument("--method", default="ngram", help="ngram or eagle3 (default: %(default)s)")
    parser.add_argument("--drafts", type=int, default=8, help="most drafts of a step (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON lines are appended to this file")
    options = parser.parse_args()
    encoder, engines = Encoder(NANO), [engine("none"), engine(options.method, options.drafts)]
    where, differs, ratios = describe("cpu", None), False, []
    for number, skill in enumerate(SKILLS):
        if options.only and not any(text in skill.name for text in options.only):
            continue
        measure(skill, engines, encoder, 2, SEED - 1000)  # each number of rows is recorded once per process
        # No skill gets the cases of another: their answers would be drafts.
        plain, drafted = measure(skill, engines, encoder, options.cases, SEED + 1000 * number)
        differs |= plain.tokens != drafted.tokens
        if not any(plain.tokens):
            continue
        length, ratio = sum(map(len, drafted.tokens)) / max(1, drafted.steps), drafted.speed / plain.speed
        ratios.append(ratio)
        print(
            f"{skill.name:34} plain {plain.speed:6.0f} tok/s  drafts {drafted.speed:6.0f}  {ratio:5.2f}  tokens per "
            f"step {length:4.2f}{'' if plain.tokens == drafted.tokens else '  ANSWERS DIFFER'}",
            flush=True,
        )
        if options.output is not None:
            row = {
                "model": "oscine-nano",
                "skill": skill.name,
                "method": options.method,
                "k": options.drafts,
                "concurrency": 1,
                "acceptance": "measured",
                "mean_acceptance_length": round(length, 3),
                "tok_s_user": round(drafted.speed, 1),
                "plain_tok_s_user": round(plain.speed, 1),
                "ratio": round(ratio, 3),
                "gpu": where.gpu,
                "commit": where.commit,
                "date": where.date,
            }
            with options.output.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(f"mean of {len(ratios)} skills: {sum(ratios) / len(ratios):.2f} times plain")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
