"""`python -m tests.arm [--cpu NAME] [command]`: runs a command on an emulated Arm processor; by default some tests.

QEMU translates instructions of Arm to those of this machine. An x86 keeps the order of stores, which an Arm may change:
that order is not tested here but by tests/extensions/parallel/test_memory_order.py.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.arm import root


class Cpu(NamedTuple):
    """What QEMU emulates, and what Linux would say of it."""

    qemu: str
    part: str
    features: str


_BASE = "fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
# By the processors of products. SVE has vectors of 128 bits, as in all of these: torch's BLAS for Arm computes wrong
# products with longer ones.
CPUS = {
    "grace": Cpu(  # GB200; DGX Spark has the same instructions
        "max,sve-max-vq=1,pauth-impdef=on",
        "0xd4f",
        f"{_BASE} jscvt fcma sha3 sm3 sm4 sha512 sve asimdfhm ilrcpc flagm sb paca pacg dcpodp sve2 sveaes svepmull "
        "svebitperm svesha3 svesm4 flagm2 frint svei8mm svebf16 i8mm bf16 rng bti",
    ),
    "orin": Cpu("neoverse-n1", "0xd0c", _BASE),  # Jetson: dot products, and no SVE
}
PYTEST = ("python3", "-m", "pytest", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin")
TESTS = (
    *(f"tests/ops/test_native{name}.py" for name in ("", "_library", "_cache")),
    "tests/extensions/parallel",
    "tests/extensions/cluster/test_shared_experts.py",
)
PATIENCE = 8  # times deadlines of tests
# In a mount namespace of its own. The machine's own processor is hidden: the C compiler and torch look for Arm's.
_ENTER = """
set -e
mount --make-rprivate /
mount -t proc proc "$ROOT/proc"
mount --rbind /sys "$ROOT/sys"
mount --rbind /dev "$ROOT/dev"
mount -t tmpfs tmpfs "$ROOT/tmp"
mount --bind "$FOLDER/cpuinfo" "$ROOT/proc/cpuinfo"
mount --bind "$FOLDER/cpu" "$ROOT/sys/devices/system/cpu"
mkdir -p "$ROOT$CHECKOUT"
mount --bind "$CHECKOUT" "$ROOT$CHECKOUT"
exec env -i HOME=/root LC_ALL=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin QEMU_CPU="$QEMU_CPU" \
    OMP_NUM_THREADS=1 OSCINE_TEST_PATIENCE="$PATIENCE" PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
    chroot "$ROOT" sh -c 'cd "$0" && exec "$@"' "$CHECKOUT" "$@"
"""


def run(cpu: Cpu, command: list[str]) -> int:
    _describe(cpu, root.FOLDER)
    names = {"ROOT": root.ROOT, "FOLDER": root.FOLDER, "CHECKOUT": root.CHECKOUT}
    environment = os.environ | {name: str(path) for name, path in names.items()}
    environment |= {"QEMU_CPU": cpu.qemu, "PATIENCE": str(PATIENCE)}
    return subprocess.run(["unshare", "--mount", "sh", "-c", _ENTER, "arm", *command], env=environment).returncode


def _describe(cpu: Cpu, folder: Path) -> None:
    """Writes files of /proc and /sys."""
    count = os.cpu_count() or 1
    lines = f"Features\t: {cpu.features}\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x0\n"
    lines += f"CPU part\t: {cpu.part}\nCPU revision\t: 0\n"
    (folder / "cpuinfo").write_text("\n".join(f"processor\t: {i}\n{lines}" for i in range(count)))
    for i in range(count):
        registers = folder / "cpu" / f"cpu{i}" / "regs" / "identification"
        registers.mkdir(parents=True, exist_ok=True)
        (registers / "midr_el1").write_text(f"0x00000000410f{cpu.part[2:]}0\n")
    for name in ("online", "possible", "present"):
        (folder / "cpu" / name).write_text(f"0-{count - 1}\n" if count > 1 else "0\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.arm", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cpu", choices=CPUS, default="grace", help="the processor to emulate (default: grace)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="default: the tests of C kernels, ranks and experts")
    options = parser.parse_args()
    root.make()
    return run(CPUS[options.cpu], options.command or [*PYTEST, "--timeout", "900", *TESTS])


if __name__ == "__main__":
    sys.exit(main())
