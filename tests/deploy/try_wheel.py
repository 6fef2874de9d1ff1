"""Installs a wheel into an empty environment, asks a question and serves: `python -m tests.deploy.try_wheel WHEEL`.

`make wheel` builds it from the source archive, so everything that is in it was in the archive. Then `uvx --from WHEEL`
asks the same question.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from email import message_from_string
from pathlib import Path

from tests.deploy.try_image import ask_server

ROOT = Path(__file__).parents[2]
DATA = (
    "model/nano/model.safetensors",
    "ops/native/oscine.h",
    "profiles/low_latency.yaml",
    "web/index.html",
    "py.typed",
)


def check_files(wheel: Path) -> None:
    """Everything that git has of the package is in the wheel."""
    listed = subprocess.run(["git", "ls-files", "oscine"], cwd=ROOT, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    missing = set(listed.stdout.split()) - names
    assert not missing, f"not in the wheel: {sorted(missing)}"
    assert {f"oscine/{name}" for name in DATA} <= names


def check_description(wheel: Path) -> None:
    """Links of the README are absolute, and name files of the repository."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(name).decode())
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    assert len(links) > 10
    for link in links:
        assert link.startswith("https://"), link
        if link.startswith(f"{source}/"):
            _, _, path = link.removeprefix(f"{source}/").split("/", 2)
            assert (ROOT / path.partition("#")[0]).exists(), link


def by_uvx(wheel: Path, commands: Path, folder: str) -> str:
    """An answer. uv is told of the indexes that pip is configured with."""
    subprocess.run([commands / "pip", "install", "-q", "uv"], check=True)
    told = subprocess.run([commands / "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    pip = dict(re.findall(r"^global\.([\w-]+)='(.*)'$", told, re.MULTILINE))
    indexes = {
        "UV_DEFAULT_INDEX": pip.get("index-url"),
        "UV_INDEX": pip.get("extra-index-url"),
        "UV_FIND_LINKS": pip.get("find-links"),
    }
    environment = os.environ | {name: value for name, value in indexes.items() if value}
    environment |= {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_CONSTRAINT": str(ROOT / "constraints.txt")}
    command = [commands / "uvx", "--from", wheel, "oscine", "chat", "What is 27 + 58?"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    check_files(wheel)
    check_description(wheel)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        commands = Path(folder) / "bin"
        constraints = ["-c", str(ROOT / "constraints.txt")]
        subprocess.run([commands / "pip", "install", "-q", *constraints, "torch"], check=True)
        subprocess.run([commands / "pip", "install", "-q", *constraints, wheel], check=True)
        question = [commands / "oscine", "chat", "What is 27 + 58?"]
        said = subprocess.run(question, cwd=folder, capture_output=True, text=True, check=True).stdout
        assert "85" in said, said
        served = ask_server([str(commands / "oscine"), "serve", "--port", "0"])
        assert "85" in served, served
        said = by_uvx(wheel, commands, folder)
        assert "85" in said, said
    print(f"{wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB) answers and serves, and answers by uvx")


if __name__ == "__main__":
    main()
