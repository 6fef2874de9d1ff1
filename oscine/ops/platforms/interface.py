"""What a platform is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from oscine.kv_dtype import KVDtype
from oscine.ops.target import Target


def nothing_lacks(*_: object) -> None:
    return None


def never(*_: object) -> bool:
    return False


def needs_hopper_or_blackwell(*_: object) -> str:
    return "a GPU of compute capability 9.0 (Hopper), 10.x or 12.x (Blackwell), and --dtype bfloat16"


@dataclass(frozen=True, slots=True)
class Platform:
    """A kind of device: which backends its ops have, and what they can do."""

    name: str
    matches: Callable[[Target, torch.dtype], bool]  # dtype: of activations
    backends: Mapping[str, str]  # op -> backend (ops/platforms/table.py); "*": every op that is not named
    # What keeps keys and values from being of a type, in words; None: nothing
    lacking_for_keys: Callable[[Target, KVDtype], str | None] = nothing_lacks
    # What keeps activations of the experts from being in FP8; int: columns of them
    lacking_for_fp8_experts: Callable[[int], str | None] = nothing_lacks
    uses_triton: bool = False  # its kernels are compiled by Triton at the start
    has_c_kernels: bool = False  # of ops/native: weights as --cpu-weights says, steps that can be recorded
    # Runs kernels that no test has run on such a GPU; what is wrong with their results, in words. None: nothing. They
    # may fault or hang: apart.py
    trial: Callable[[Target], str | None] = nothing_lacks
    needs_trial: Callable[[Target], bool] = never
    screens_projections: bool = False  # it may have the projections of attention in a second form, for few tokens
