"""NIM's model profiles: the layouts in which a published model is served, each with an id.

A profile has a readable name, and as its id the SHA-256 of model and name, as NIM has it.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from oscine.settings.config import NANO, Config

_SIZES = (1, 2, 4, 8)  # numbers of GPUs
_MODELS = ("gpt-oss-20b", "gpt-oss-120b")
_THROUGHPUT = "max_throughput"


@dataclass(frozen=True, slots=True)
class Profile:
    model: str
    ranks: int = 1  # of an engine
    engines: int = 1

    @property
    def name(self) -> str:
        return f"oscine-mxfp4-tp{self.ranks}" + (f"-dp{self.engines}" if self.engines > 1 else "")

    @property
    def id(self) -> str:
        return hashlib.sha256(f"{self.model} {self.name}".encode()).hexdigest()

    @property
    def num_gpus(self) -> int:
        return self.ranks * self.engines

    @property
    def options(self) -> dict[str, Any]:
        """Values by the names of options. Several engines are for throughput, several ranks for latency."""
        layout = {"tensor-parallel-size": self.ranks, "data-parallel-size": self.engines}
        sizes = {name: size for name, size in layout.items() if size > 1}
        return {"model": self.model, **sizes} | ({"profile": _THROUGHPUT} if self.engines > 1 else {})

    @property
    def tags(self) -> dict[str, str]:
        kind = "throughput" if self.engines > 1 else "latency"
        layout = {"tp": str(self.ranks), "dp": str(self.engines), "pp": "1"}
        return {"model": self.model, "precision": "mxfp4", **layout, "profile": kind, "llm_engine": "oscine"}


PROFILES = (
    *(Profile(model, ranks) for model in _MODELS for ranks in _SIZES),
    *(Profile(model, 1, engines) for model in _MODELS for engines in _SIZES[1:]),
    Profile(NANO),
)


def find_profile(wanted: str) -> Profile:
    """By id, or by name if only one model has it, or by `MODEL NAME`. Raises ValueError."""
    found = [p for p in PROFILES if wanted in (p.id, p.name, f"{p.model} {p.name}")]
    if len(found) == 1:
        return found[0]
    raise ValueError(f"{wanted!r} is no id of a model profile: `oscine list-model-profiles` shows them")


def profile_of(config: Config) -> Profile | None:
    """The profile in which a server runs; None for any other model or layout."""
    model = config.engine.model
    served = Profile(model.model.removeprefix("openai/"), model.tensor_parallel_size, config.server.data_parallel_size)
    return served if served in PROFILES else None
