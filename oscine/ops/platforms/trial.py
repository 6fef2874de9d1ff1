"""The program of a trial (apart.py): prints what is wrong with the new kernels of a platform, or nothing.

python -m oscine.ops.platforms.trial PLATFORM GPU ACTIVATIONS
"""

import sys
from dataclasses import replace
from typing import Any

import torch

from oscine.ops.platforms.table import named
from oscine.ops.target import Target


def main() -> None:
    activations: Any
    name, gpu, activations = sys.argv[1:]
    target = replace(Target.of(torch.device("cuda", int(gpu))), activation_dtype=activations)
    print(named(name).trial(target) or "")


if __name__ == "__main__":
    main()
