"""Adds a platform, and a type of keys and values, to a copy of the package: the edits below are all that each needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.without import copy_package

# Files, and what to replace in each; new files have nothing to replace.
PLATFORM = (
    (
        "ops/platforms/fake.py",
        "",
        "from oscine.ops.platforms.interface import Platform\n\n"
        'PLATFORM = Platform("fake", lambda target, dtype: target.device.type == "cpu", {"*": "reference"})\n',
    ),
    (
        "ops/platforms/table.py",
        "import blackwell, blackwell_rtx, cuda, hopper,",
        "import blackwell, blackwell_rtx, cuda, fake, hopper,",
    ),
    ("ops/platforms/table.py", "PLATFORMS = (", "PLATFORMS = (fake.PLATFORM, "),
)
DTYPE = (
    ("kv_dtype.py", '    UINT8 = "uint8"', '    E5M2 = "float8_e5m2"\n    UINT8 = "uint8"'),
    ("kv_dtype.py", "    KVDtype.UINT8: 1,", "    KVDtype.UINT8: 1,\n    KVDtype.E5M2: 1,"),
    ("settings/config.py", "KV_DTYPES = {", 'KV_DTYPES = {"fp8_e5m2": KVDtype.E5M2, '),
    ("settings/config.py", '"fp8", "fp8_e4m3"] =', '"fp8", "fp8_e4m3", "fp8_e5m2"] ='),
)
ASK = """
import torch
from oscine.engine.build import build_engine
from oscine.llm import LLM
from oscine.ops.platforms.table import platform_of
from oscine.ops.target import Target
from oscine.settings.config import Config

with LLM(kv_cache_dtype="{dtype}") as llm:
    print(llm.chat([{{"role": "user", "content": "What is 27 + 58?"}}], temperature=0, max_tokens=200).content)
print(build_engine(Config.of({{"kv-cache-dtype": "{dtype}"}}).engine).loop.cache.groups[0].dtype)
print(platform_of(Target.of(torch.device("cpu")), torch.float32).name)
"""


def package_with(folder: Path, *changes: tuple[str, str, str]) -> Path:
    """A folder for sys.path with the package, changed."""
    copy_package(folder)
    for name, old, new in changes:
        path = folder / "oscine" / name
        text = path.read_text() if old else ""
        assert not old or text.count(old) == 1, f"{name} does not have {old!r} once"
        path.write_text(text.replace(old, new) if old else new)
    return folder


def ask(folder: Path, dtype: str = "auto") -> list[str]:
    """The answer, the type of keys and values, and the platform."""
    command = [sys.executable, "-c", ASK.format(dtype=dtype)]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    child = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return child.stdout.splitlines()


@pytest.mark.long
def test_a_platform(tmp_path: Path) -> None:
    assert ask(package_with(tmp_path, *PLATFORM)) == ["27 + 58 = 85.", "float32", "fake"]


@pytest.mark.long
def test_a_type_of_keys_and_values(tmp_path: Path) -> None:
    """The reference backends store and load it; a platform that has kernels of its own converts in these."""
    folder = package_with(tmp_path, *PLATFORM, *DTYPE)
    assert ask(folder, "fp8_e5m2") == ["27 + 58 = 85.", "float8_e5m2", "fake"]
