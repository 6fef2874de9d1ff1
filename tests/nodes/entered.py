"""Enters the namespaces in which several nodes can be made, or says why that is not possible here.

A user namespace makes this user root of a network, a mount table and a process tree of their own. No packet leaves it,
its temporary folders are new, and the kernel ends all its processes with the first one.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

INSIDE = "OSCINE_TEST_NODES"  # environment variable: set where nodes can be made
ROOT = Path(__file__).resolve().parents[2]
TEMPORARY = ("/tmp", "/dev/shm", "/var/tmp")  # each node has its own
_PROGRAMS = ("unshare", "nsenter", "mount", "ip", "bash")
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--ipc", "--uts", "--fork")
# What the nodes need of the kernel: a bridge, a pair of virtual devices, a TAP device.
_TRIAL = """
mount -t tmpfs tmpfs /tmp && ip link add switch type bridge && ip link add here type veth peer name there &&
ip tuntap add dev tap mode tap && unshare --mount --pid --ipc --uts --net --fork --mount-proc true
"""
# In the new namespaces: temporary folders that end with them, and a loopback device. Bash stays as process 1 and waits
# for orphans: the kernel ends no node before its last process has been waited for.
_BEGIN = """
mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && ip link set lo up || exit 1
"$@"
exit $?
"""


def run_inside(*argv: str) -> int:
    """Runs `argv` where nodes can be made, and returns its status. Where they cannot, prints why and returns 0."""
    reason = refusal()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    variables = {INSIDE: "1", "HOME": "/tmp", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    inside = command("bash", "-c", _BEGIN, "nodes", *argv)
    return subprocess.run(inside, cwd=ROOT, env=environment() | variables).returncode


def command(*argv: str) -> list[str]:
    """`argv` as root of new namespaces. It is killed with all that it started when its parent ends."""
    return [*_UNSHARE, "--kill-child", "--mount-proc", "--", *argv]


def refusal() -> str | None:
    """Why this machine can have no nodes; None if it can."""
    if sys.platform != "linux":
        return f"nodes need Linux's namespaces, and this is {sys.platform}"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"nodes need programs that are not installed: {', '.join(missing)} (util-linux, iproute2)"
    for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix)):
        for folder in TEMPORARY:
            if path.is_relative_to(folder):
                return f"nodes hide {folder}, and {path} is below it"
    done = subprocess.run(
        command("bash", "-c", _TRIAL), env=environment(), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return f"this machine allows no namespaces to users: {said[-1] if said else f'status {done.returncode}'}"
    return None


def environment() -> dict[str, str]:
    return os.environ | {"PATH": _path()}


def _path() -> str:
    return os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
