"""Installs a release on a node: a virtual environment with a copy of this package, and all others of this environment.

    python -m tests.nodes.release FOLDER VERSION [--other-messages] [--archive TAR]

`--other-messages`: a record that ingresses and replicas send has one more field. `--archive`: the package is that of a
tar file, such as `git archive COMMIT oscine` makes.
"""

import argparse
import re
import shutil
import sysconfig
import tarfile
import venv
from pathlib import Path

import oscine

_RECORD = '    """Answered by Seen."""\n'


def make(folder: Path, version: str, *, other_messages: bool, archive: Path | None) -> None:
    venv.EnvBuilder(symlinks=True).create(folder)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "all_other.pth").write_text(sysconfig.get_path("purelib"))
    if archive is not None:
        with tarfile.open(archive) as tar:
            tar.extractall(packages, filter="data")
    else:
        shutil.copytree(Path(oscine.__file__).parent, packages / "oscine")
    _edit(packages / "oscine/__init__.py", r'__version__ = ".*"', f'__version__ = "{version}"')
    if other_messages:
        records = packages / "oscine/extensions/replicas/spec/router_messages.py"
        _edit(records, re.escape(_RECORD), f"{_RECORD}\n    depth: int = 0\n")


def _edit(file: Path, pattern: str, text: str) -> None:
    edited, count = re.subn(pattern, text.replace("\\", r"\\"), file.read_text())
    assert count == 1, f"{file} has {count} times {pattern}"
    file.write_text(edited)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("version")
    parser.add_argument("--other-messages", action="store_true")
    parser.add_argument("--archive", type=Path)
    args = parser.parse_args()
    make(args.folder, args.version, other_messages=args.other_messages, archive=args.archive)
