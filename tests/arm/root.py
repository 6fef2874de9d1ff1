"""An Arm Linux below runs/arm, with Python, torch, this project's dependencies and a C compiler.

Debian's packages come by mmdebstrap and Python's by pip, each in its build for aarch64. Their programs run here by
QEMU, which the kernel starts for each of them. So this needs root, and the packages mmdebstrap, arch-test and
qemu-user-static. Torch comes with CUDA's libraries, and takes 6 GB of disk.
"""

import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = CHECKOUT / "runs" / "arm"
ROOT = FOLDER / "root"
_DEBIAN = "python3,python3-dev,gcc,libc6-dev,libgomp1,git,make,procps,iproute2,ca-certificates"
_BINFMT = Path("/proc/sys/fs/binfmt_misc")
# Of the extra `test`: what checks sources, drives a browser, or is not needed by the tests that run here
_LEFT_OUT = re.compile(r"ruff|mypy|import-linter|types-|playwright|schemathesis")
_OLDEST_GLIBC, _NEWEST_GLIBC = 17, 36  # 2.36 is that of Debian 12


def make() -> None:
    """Makes it, if it is not there. Raises SystemExit with what is missing."""
    _refuse()
    if (ROOT / ".ready").exists():
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    codename = platform.freedesktop_os_release()["VERSION_CODENAME"]
    command = ["mmdebstrap", "--quiet", "--arch=arm64", "--variant=minbase", "--mode=root"]
    _run([*command, f"--include={_DEBIAN}", codename, str(ROOT)])
    (ROOT / "etc" / "hosts").write_text("127.0.0.1 localhost\n")
    _install(_requirements())
    (ROOT / ".ready").touch()


def _refuse() -> None:
    missing = [name for name in ("mmdebstrap", "arch-test", "unshare") if shutil.which(name) is None]
    if missing:
        raise SystemExit(f"there is no {', no '.join(missing)}")
    if not (_BINFMT / "status").exists():
        _run(["mount", "-t", "binfmt_misc", "binfmt_misc", str(_BINFMT)])
    if not (_BINFMT / "qemu-aarch64").exists() and platform.machine() != "aarch64":
        raise SystemExit("the kernel has no interpreter for aarch64: install qemu-user-static and binfmt-support")


def _requirements() -> list[str]:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extra = [name for name in project["optional-dependencies"]["test"] if not _LEFT_OUT.match(name)]
    return [*project["dependencies"], *extra]


def _install(requirements: list[str]) -> None:
    """By this machine's pip, which is quicker: it only unpacks wheels."""
    library = next((ROOT / "usr" / "lib").glob("python3.[0-9]*"))
    packages = ROOT / "usr" / "local" / "lib" / library.name / "dist-packages"
    version = library.name.removeprefix("python")
    abis = [f"cp{version.replace('.', '')}", "abi3", "none"]
    kinds = [f"manylinux_2_{minor}_aarch64" for minor in range(_NEWEST_GLIBC, _OLDEST_GLIBC - 1, -1)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", version, "--target", str(packages)]
    command += [word for abi in abis for word in ("--abi", abi)]
    command += [word for kind in (*kinds, "manylinux2014_aarch64") for word in ("--platform", kind)]
    _run([*command, "-c", str(CHECKOUT / "constraints.txt"), *requirements])
    (packages / "checkout.pth").write_text(f"{CHECKOUT}\n")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed with status {done.returncode}")
