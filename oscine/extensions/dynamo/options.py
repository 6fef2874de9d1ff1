"""The options of a worker under NVIDIA Dynamo. Needs none of Dynamo's packages."""

from dataclasses import dataclass, field
from pathlib import Path

from oscine.settings.config import EngineOptions
from oscine.settings.option import TOKENS, Options, option
from oscine.types import Role


@dataclass(frozen=True)
class DynamoOptions(Options, group="worker"):
    """One worker."""

    folder: Path  # of the model, as the frontend finds it too
    name: str  # that clients ask for
    engine: EngineOptions = field(default_factory=EngineOptions)  # whose `peers` are made here
    key: str = field(default="", repr=False)  # shared by workers: see oscine.engine.wire.tcp
    runtime: tuple[str, ...] = ()  # command line of Dynamo's runtime; what is not on it comes from DYN_* and defaults
    role: Role = option("aggregated", "what the worker computes: whole requests, prompts, or what follows")
    peer_host: str = option(
        "127.0.0.1",
        "address of this machine for other workers; see OSCINE_CLUSTER_KEY in docs/dynamo.md",
        "ADDRESS",
    )
    prefill_min_tokens: int = option(
        1, "fewest uncached tokens of a prompt for which role decode asks a prefill worker", TOKENS, at_least=1
    )
    prefill_timeout_s: float = option(
        30.0, "seconds to wait for pages before the prompt is computed here", "SECONDS", above=0
    )
