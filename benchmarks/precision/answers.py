"""How many answers of the embedded model are right with FP8 and with MXFP8 activations of its experts.

    python -m benchmarks.precision.answers --cases 1 --long 4

Greedy, held-out questions, on a CPU by the reference ops in bfloat16. The formats are emulated: those of formats.py, by
the place where the reference rounds to FP8. Exact activations come first.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from unittest.mock import patch

import torch

from benchmarks.precision.formats import FP8, MXFP8, Rounding
from oscine.checkpoint.hub import NANO_FOLDER
from oscine.engine.build import build_engine
from oscine.ops.moe import reference
from oscine.settings.config import NANO, CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from training.evaluate import LONG, SKILLS, Asked, answer, engine_generator, print_tables
from training.packing import Encoder

PRECISIONS: dict[str, tuple[Rounding, Rounding] | None] = {"exact": None, "FP8": FP8, "MXFP8": MXFP8}


@contextmanager
def rounding(formats: tuple[Rounding, Rounding] | None) -> Iterator[None]:
    """The reference's experts with FP8 activations round x and h this way instead. None: unchanged."""
    if formats is None:
        yield
        return
    of_x, of_h = formats
    with patch.multiple(reference, round_rows=of_x, round_h=lambda h, _: of_h(h)):
        yield


def options_for(formats: tuple[Rounding, Rounding] | None) -> EngineOptions:
    model = ModelOptions(NANO, device="cpu", dtype="bfloat16", activation_dtype="auto" if formats is None else "fp8")
    limits = SchedulerOptions(max_num_seqs=128, max_num_batched_tokens=4096)
    return EngineOptions(model, CacheOptions(kv_cache_bytes=2 << 30), scheduler=limits, quiet=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=4, help="cases per skill (default: %(default)s)")
    parser.add_argument("--long", type=int, default=20, help=f"cases of {LONG} (default: %(default)s)")
    chosen = parser.parse_args()
    encoder = Encoder(NANO_FOLDER)
    asked = [Asked.of(skill, chosen.long if skill.name == LONG else chosen.cases) for skill in SKILLS]
    found: dict[str, list[list[str]]] = {}
    for name, formats in PRECISIONS.items():
        began_s = perf_counter()
        with rounding(formats), torch.inference_mode():
            loop = build_engine(options_for(formats)).loop
            found[name] = answer(engine_generator(loop, encoder), encoder, asked)
        print(f"{name}: {perf_counter() - began_s:.0f} s", flush=True)
    print_tables(asked, found)


if __name__ == "__main__":
    main()
