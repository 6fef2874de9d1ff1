"""How many files a new platform, and a new type of keys and values, touch: a copy of the package gets a fake one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_repository import ROOT

MOST = 5  # files that an addition may touch

# Files, and what to replace in each; new files have nothing to replace.
PLATFORM = (
    (
        "ops/platforms/fake.py",
        "",
        "from oscine.ops.platforms.interface import Platform\n\n"
        'PLATFORM = Platform("fake", lambda target, dtype: target.device.type == "cpu", {"*": "reference"})\n',
    ),
    ("ops/platforms/table.py", "import cuda, hopper,", "import cuda, fake, hopper,"),
    ("ops/platforms/table.py", "PLATFORMS = (", "PLATFORMS = (fake.PLATFORM, "),
)
DTYPE = (
    ("kv_dtype.py", '    UINT8 = "uint8"', '    E5M2 = "float8_e5m2"\n    UINT8 = "uint8"'),
    ("kv_dtype.py", "    KVDtype.UINT8: 1,", "    KVDtype.UINT8: 1,\n    KVDtype.E5M2: 1,"),
    ("settings/config.py", "KV_DTYPES = {", 'KV_DTYPES = {"fp8_e5m2": KVDtype.E5M2, '),
    ("settings/config.py", '"fp8", "fp8_e4m3"] =', '"fp8", "fp8_e4m3", "fp8_e5m2"] ='),
)
ASK = """
from oscine.llm import LLM
import torch
from oscine.ops.platforms.table import platform_of
from oscine.ops.target import Target
with LLM({options}) as llm:
    print(llm.chat([{{"role": "user", "content": "What is 27 + 58?"}}], temperature=0, max_tokens=200).content)
print(platform_of(Target.of(torch.device("cpu")), torch.float32).name)
"""


def package_with(folder: Path, *changes: tuple[str, str, str]) -> Path:
    """A folder for sys.path with the package, changed."""
    shutil.copytree(ROOT / "oscine", folder / "oscine", ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in changes:
        path = folder / "oscine" / name
        text = path.read_text() if old else ""
        assert not old or text.count(old) == 1, f"{name} does not have {old!r} once"
        path.write_text(text.replace(old, new) if old else new)
    return folder


def ask(folder: Path, options: str = "") -> list[str]:
    """The answer, and the platform that gave it."""
    command = [sys.executable, "-c", ASK.format(options=options)]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()


@pytest.mark.long
def test_a_platform_touches_few_files(tmp_path: Path) -> None:
    assert ask(package_with(tmp_path, *PLATFORM)) == ["27 + 58 = 85.", "fake"]
    assert len({name for name, *_ in PLATFORM}) <= MOST


@pytest.mark.long
def test_a_type_of_keys_and_values_touches_few_files(tmp_path: Path) -> None:
    """The reference backends store and load it; a platform that has kernels of its own converts in these."""
    folder = package_with(tmp_path, *PLATFORM, *DTYPE)
    assert ask(folder, "kv_cache_dtype='fp8_e5m2'") == ["27 + 58 = 85.", "fake"]
    assert len({name for name, *_ in DTYPE}) <= MOST
