"""A folder with an EAGLE-3 head: config.json and safetensors, in any published format (config.py).

Everything is checked from the headers before the first tensor is read.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from oscine.checkpoint.folder import check_tensor, open_files
from oscine.checkpoint.hub import CONFIG
from oscine.checkpoint.layout import FLOATS
from oscine.extensions.speculation.eagle.config import HeadConfig
from oscine.extensions.speculation.eagle.weights import UNUSED, head_specs, published_name
from oscine.model.config import ModelConfig
from oscine.system.model_files import shown

_INTEGERS = ("I64", "I32")  # as safetensors spells them


@dataclass(frozen=True, slots=True)
class OpenedHead:
    """A checked head; a TensorSource by the names of oscine/extensions/speculation/eagle/weights.py."""

    config: HeadConfig
    names: Collection[str]
    _stored: dict[str, tuple[Any, str]]  # the file and the name in it, by name

    def get(self, name: str) -> Tensor:
        file, stored = self._stored[name]
        tensor: Tensor = file.get_tensor(stored)
        return tensor


def open_head(folder: Path, target: ModelConfig) -> OpenedHead:
    """Raises ValueError naming the file, and the field or tensor that does not fit the format or the target."""
    config = HeadConfig.from_file(folder / CONFIG, target)
    places: dict[str, tuple[Path, Any, str]] = {}
    for path, file in open_files(folder).items():
        for stored in sorted(file.keys()):
            name = published_name(stored)
            if name in places:
                raise ValueError(
                    f"{path}: {shown(stored)} is also in {places[name][0].name}, as {shown(places[name][2])}"
                )
            if name not in UNUSED:
                places[name] = path, file, stored
    specs = head_specs(config, places)
    for name, (path, file, stored) in places.items():
        if (spec := specs.get(name)) is None:
            raise ValueError(f"{path}: {shown(stored)} is not a tensor of a head with this config.json")
        dtypes = _INTEGERS if spec.kind == "integer" else FLOATS
        check_tensor(stored, spec.shape, dtypes, path, file.get_slice(stored))
    for name in specs:
        if name not in places:
            raise ValueError(f"{folder}: {name} is missing")
    return OpenedHead(config, places.keys(), {name: (file, stored) for name, (_, file, stored) in places.items()})
