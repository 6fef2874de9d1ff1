"""How Oscine starts Python processes of its own: with its own code, and never with modules of the current folder."""

import os
import site
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parent.parent)  # the folder that holds the package


def module_command(module: str) -> list[str]:
    """Runs a module of an installed package. Without -P the current folder would come before all packages."""
    return [sys.executable, "-P", "-m", module]


def child_environment() -> dict[str, str]:
    """This process's environment, in which a child finds the `oscine` that runs here, installed or not."""
    if _ROOT in (*site.getsitepackages(), site.getusersitepackages()):
        return dict(os.environ)
    folders = [_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
