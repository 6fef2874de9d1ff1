"""Starts Python processes that run Oscine's own code, and never load modules from the current folder."""

import os
import runpy
import signal
import site
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])
# The folder of the package if Python does not search it by itself, as for a checkout that is not installed.
CHECKOUT = None if _ROOT in (*site.getsitepackages(), site.getusersitepackages()) else _ROOT

# Of a process that computes: OpenMP threads that spin while they wait make a step 10 to 100 times slower once another
# process wants the cores.
COMPUTING = {"OMP_WAIT_POLICY": "passive"}
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def module_command(module: str) -> list[str]:
    """The command for a module. Without -P Python would search the current folder before all packages."""
    return [sys.executable, "-P", "-m", module]


def bound_command(module: str) -> list[str]:
    """The same for a process that is killed when this one ends, also while it imports. Signals are left to this one."""
    return [*module_command(__name__), str(os.getpid()), module]


def child_environment() -> dict[str, str]:
    """This process's environment, so that a child finds the same `oscine`, installed or not."""
    if CHECKOUT is None:
        return dict(os.environ)
    folders = [CHECKOUT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)}


def die_with_parent() -> None:
    """Has this process killed when its parent ends, also if it is stopped."""
    import ctypes  # few processes need it, and all import this module

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _main(parent: str, module: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() == int(parent):  # else it has ended already
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
