"""An editable install, from a folder that holds the clone."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_editable(sys.argv[1]))"
# As Python does for its own folder of packages: the path files in it are read.
_IMPORT = "import site, sys; site.addsitedir(sys.argv[1]); from oscine import LLM; print(LLM)"


@pytest.mark.long
def test_the_package_is_found_beside_a_folder_of_its_name(tmp_path: Path) -> None:
    clone, site = tmp_path / "oscine", tmp_path / "site-packages"
    (clone / "oscine").mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    (clone / "oscine" / "__init__.py").write_text("LLM = 'the class'\n")
    built = subprocess.run(
        [sys.executable, "-c", _BUILD, str(tmp_path)], cwd=clone, capture_output=True, text=True, check=True
    )
    with zipfile.ZipFile(tmp_path / built.stdout.split()[-1]) as wheel:
        wheel.extractall(site)
    command = [sys.executable, "-S", "-c", _IMPORT, str(site)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PATH": ""})
    assert (done.stdout, done.stderr) == ("the class\n", "")
