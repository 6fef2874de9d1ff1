"""How many drafts of an EAGLE-3 head its target accepts: `python -m training.acceptance [--cases 10]`.

The target answers held-out prompts greedily. The head then drafts at every position of the answers, from the true
tokens before it. That gives the steps of speculative decoding without running it, since a draft after a wrong one is
never accepted. Attention is dense, so long prompts are left out.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from oscine.engine.build import build_engine
from oscine.settings.config import EngineOptions, ModelOptions
from training.eagle import run_target, unrolled
from training.eagle_head import Head, load_head
from training.evaluate import MAX_TOKENS, NANO, SEED, SKILLS, engine_generator
from training.export import load
from training.model import GptOss
from training.packing import Encoder
from training.split import Draw

HEAD = NANO / "eagle3"
_MAX_TOKENS = 1200  # of a prompt


@torch.inference_mode()
def accepted_per_step(head: Head, target: GptOss, prompt: list[int], answer: list[int], drafts: int) -> list[int]:
    """How many drafts each step of speculative decoding accepts. The prompt's own step yields the first token."""
    ids = torch.tensor([prompt + answer])
    starts = torch.zeros(1, ids.shape[1] - 1, dtype=torch.int32)
    streams, _ = run_target(target, ids[:, :-1], starts)
    choices = [logits[0].argmax(-1).tolist() for logits in unrolled(head, target, streams, ids, starts, drafts)]
    tokens, accepted = prompt + answer, []
    known = len(prompt) + 1
    while known < len(tokens):
        right = 0
        while right < drafts and known + right < len(tokens) - 1 and choices[right][known - 2] == tokens[known + right]:
            right += 1
        accepted.append(right)
        known += right + 1
    return accepted


def report(name: str, accepted: Sequence[int], drafts: int) -> None:
    """One line: mean tokens per step, and the share of steps that accept the first draft, the first two, and so on."""
    shares = " ".join(f"{sum(count >= s for count in accepted) / len(accepted):7.1%}" for s in range(1, drafts + 1))
    print(
        f"{name:34}{len(accepted):6} steps {1 + sum(accepted) / len(accepted):6.2f} tokens per step {shares}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", type=Path, default=HEAD, help="folder of the head (default: %(default)s)")
    parser.add_argument("--cases", type=int, default=10, help="cases per skill (default: %(default)s)")
    parser.add_argument("--only", default="", help="measure only the skills whose names contain this")
    parser.add_argument("--drafts", type=int, default=3, help="drafts per step (default: %(default)s)")
    options = parser.parse_args()
    encoder, head, target = Encoder(NANO), load_head(options.head), load(NANO)
    generate = engine_generator(build_engine(EngineOptions(model=ModelOptions(str(NANO)), quiet=True)).loop, encoder)
    means, everything = [], []
    for skill in (skill for skill in SKILLS if options.only in skill.name):
        made = [skill.make(Draw(SEED + i, held_out=True)) for i in range(options.cases)]
        samples = [sample for sample in made if len(encoder.prompt(sample)) <= _MAX_TOKENS]
        if not samples:
            continue
        prompts = [encoder.prompt(sample) for sample in samples]
        answers = generate(prompts, MAX_TOKENS, [skill.grammar(sample) for sample in samples])
        pairs = zip(prompts, answers, strict=True)
        accepted = [n for p, a in pairs for n in accepted_per_step(head, target, p, a, options.drafts)]
        report(skill.name, accepted, options.drafts)
        means.append(1 + sum(accepted) / len(accepted))
        everything += accepted
    report("all", everything, options.drafts)
    print(f"mean over the skills: {sum(means) / len(means):.2f} tokens per step")


if __name__ == "__main__":
    main()
