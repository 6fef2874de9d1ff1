"""Options of low-rank adapters (LoRA) that are applied at run time."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from oscine.settings.option import OptionError, Options, option

TARGETS = ("attention", "router", "experts")  # what adapters may change, of a layer
_LONGEST_NAME = 200


class NamedAdapter(NamedTuple):
    name: str  # as requests have it
    path: str  # folder


def named_adapter(text: str) -> NamedAdapter | None:
    """NAME=PATH, or vLLM's JSON object of name and path; None for another text."""
    if text.startswith("{"):
        try:
            values = json.loads(text)
            name, path = values["name"], values["path"]
        except (ValueError, KeyError):
            return None
    else:
        name, _, path = text.partition("=")
    valid = isinstance(name, str) and isinstance(path, str) and bool(path) and 0 < len(name) <= _LONGEST_NAME
    return NamedAdapter(name, str(Path(path).expanduser())) if valid and name.isprintable() else None


@dataclass(frozen=True)
class AdapterOptions(Options, group="model"):
    enable_lora: bool = option(
        False, "serve LoRA adapters of the model, as models of their own", opposites=("no-enable-lora",)
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "LoRA adapters to load at the start: names for requests, and folders as PEFT writes them",
        "NAME=FOLDER",
        shown="none",
        aliases=("lora-paths",),
        nargs="+",
        rule=("NAME=FOLDER, or a JSON object of name and path", lambda text: named_adapter(text) is not None),
    )
    max_loras: int = option(
        4,
        "LoRA adapters on the device at once; requests for others wait",
        "N",
        aliases=("max-loras-per-batch",),
        above=0,
        at_most=256,
    )
    max_lora_rank: int = option(16, "highest rank of a LoRA adapter", "N", above=0, at_most=64)
    max_cpu_loras: int | None = option(
        None,
        "most LoRA adapters in host memory; further ones are refused",
        "N",
        shown="no limit",
        aliases=("max-loaded-loras",),
        above=0,
    )
    lora_target_modules: tuple[str, ...] = option(
        (),
        "parts of a layer that LoRA adapters may change: attention, router, experts; each takes memory on the device",
        "PART",
        shown="those that --lora-modules change; else attention and router",
        aliases=("lora-targets",),
        nargs="+",
        choices=TARGETS,
        split=lambda text: text.replace(",", " ").split(),
    )

    @property
    def modules(self) -> list[NamedAdapter]:
        return [found for text in self.lora_modules if (found := named_adapter(text)) is not None]

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [module.name for module in self.modules]
        if names and not self.enable_lora:
            raise OptionError("lora-modules", "needs --enable-lora", "enable-lora")
        if twice := [name for name in names if names.count(name) > 1]:
            raise OptionError("lora-modules", f"has {twice[0]!r} twice")
        if self.max_cpu_loras is not None and self.max_cpu_loras < max(self.max_loras, len(names)):
            raise OptionError("max-cpu-loras", "must be at least --max-loras, and the number of --lora-modules")
