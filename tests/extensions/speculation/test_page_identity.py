"""What makes equal tokens have equal keys and values: files and other engines tell pages apart by it."""

import json
import shutil
from pathlib import Path
from typing import Literal

import pytest
from safetensors.torch import load_file, save_file

from oscine.checkpoint.hub import NANO_FOLDER
from oscine.executor.start.identity import model_identity
from oscine.extensions.speculation.eagle.find import OF_NANO
from oscine.settings.config import EngineOptions, ModelOptions, SpeculationOptions

Method = Literal["none", "eagle3"]


def identity(head: Path | None) -> str:
    method: Method = "none" if head is None else "eagle3"
    model = None if head is None else str(head)
    options = ModelOptions(str(NANO_FOLDER), device="cpu")
    return model_identity(EngineOptions(options, speculation=SpeculationOptions(method=method, model=model)))


@pytest.mark.long
def test_pages_with_keys_of_another_draft_head_are_other_pages(tmp_path: Path) -> None:
    """A page has the head's keys and values beside the model's."""
    copied = tmp_path / "head"
    shutil.copytree(OF_NANO, copied)
    own = identity(OF_NANO)
    assert identity(copied) == own
    [path] = copied.glob("*.safetensors")
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    save_file(tensors | {name: tensors[name] + 1}, path)
    trained_again = identity(copied)
    shutil.copyfile(OF_NANO / path.name, path)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert len({own, trained_again, identity(copied), identity(None)}) == 4
