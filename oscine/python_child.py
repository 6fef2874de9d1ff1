"""How Oscine starts Python processes of its own: with its own code, and never with modules of the current folder."""

import os
import site
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parent.parent)
# What holds the package, where Python does not look by itself: a checkout may not be installed.
CHECKOUT = None if _ROOT in (*site.getsitepackages(), site.getusersitepackages()) else _ROOT


def module_command(module: str) -> list[str]:
    """Runs a module of an installed package. Without -P the current folder would come before all packages."""
    return [sys.executable, "-P", "-m", module]


def child_environment() -> dict[str, str]:
    """This process's environment, in which a child finds the `oscine` that runs here, installed or not."""
    if CHECKOUT is None:
        return dict(os.environ)
    folders = [CHECKOUT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
