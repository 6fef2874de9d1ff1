"""Options of a server that loads models when they are asked for."""

import re
from dataclasses import dataclass

from oscine.settings.option import Options, option

_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
FOREVER = float("inf")


def seconds_of(text: str) -> float:
    """Seconds of a duration as Ollama writes it: 90, 1h30m, 250ms; a negative one is FOREVER. Raises ValueError."""
    number = text.removeprefix("-").removeprefix("+")
    if re.fullmatch(r"\d+(\.\d*)?", number, re.ASCII):
        seconds = float(number)
    elif _PART.sub("", number) or not number:
        raise ValueError(f"{text!r} is no duration")
    else:
        seconds = sum(float(value) * _SECONDS[unit] for value, unit in _PART.findall(number))
    return FOREVER if text.startswith("-") and seconds else seconds


def _is_duration(text: str) -> bool:
    try:
        seconds_of(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class ModelsOptions(Options, group="server"):
    """Models that are in memory only while they are used."""

    models: tuple[str, ...] = option(
        (),
        "models to serve in the place of MODEL, each loaded by the first request that names it",
        "MODEL",
        shown="MODEL alone, from the start",
        nargs="+",
        rule=("the name of a model", bool),
    )
    models_dir: str | None = option(
        None, "folder whose models are served likewise, and into which /api/pull downloads", "DIR", shown="none"
    )
    pinned_models: tuple[str, ...] = option(
        (), "names of these that are loaded at the start and never unloaded", "NAME", shown="none", nargs="+"
    )
    keep_alive: str = option(
        "5m",
        "time that such a model stays in memory after its last request, such as 90s; negative: until others need room",
        "TIME",
        rule=("a duration such as 90s, 5m, 0 or -1", _is_duration),
    )
    max_loaded_models: int | None = option(
        None, "most models that are loaded at once", "N", shown="as many as there is memory for", at_least=1
    )
    load_timeout_s: float = option(600.0, "seconds that a request waits for its model to be loaded", "SECONDS", above=0)

    @property
    def on_demand(self) -> bool:
        """Whether models are loaded when they are asked for."""
        return bool(self.models) or self.models_dir is not None
