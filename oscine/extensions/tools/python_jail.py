"""Enters a jail, and then runs the Python code from standard input.

A script of its own, for a fresh interpreter without packages: it imports the standard library alone. Its one argument
is a JSON object, see `Jail` in oscine/extensions/tools/python.py. Linux 5.14 or newer, on x86-64 and ARM64.

    server -- outer -- init -- code
              |        |- is process 1 of the namespaces: makes the file system, gives up every privilege, reaps;
              |           when it ends, the kernel ends all others
              |- unshares the namespaces; a helper beside it, still outside, maps the users

In the namespaces are one unprivileged user and no network. The file system has Python and the system's libraries,
read-only, and a small /tmp in memory. There is no /proc. A filter refuses three kinds of system calls. Some would hold
memory which no limit counts. Some reach other processes, or parts of the kernel that ordinary scripts do not use. The
rest make sockets of families without namespaces, such as those to the host of a virtual machine.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import socket
import sys
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
SYS_CLOSE_RANGE, SYS_MOUNT_SETATTR = 436, 442
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_KEYCTL = {"x86_64": 250, "aarch64": 219}
KEYCTL_JOIN_SESSION_KEYRING = 1
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED = {  # system calls, by their number on x86-64 and on ARM64
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447)},
    **{"shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
    **{"unshare": (272, 97), "setns": (308, 268)},
}
SOCKET = {"x86_64": 41, "aarch64": 198}
SETSOCKOPT = {"x86_64": 54, "aarch64": 208}
SOL_SOCKET = 1
SOCKET_BUFFERS = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF and their FORCE; no limit counts them, so they keep their size
SOCKET_FAMILIES = (1, 2, 10, 16)  # UNIX, IPv4, IPv6 and netlink, which the network namespace holds back
X32 = 0x40000000  # first number of x86-64's second system call table; the numbers of ARM64 are far below

USER = 1000  # inside
NOBODY = 65534  # outside, if the server is root
BASE = "/proc"  # a folder that always exists and the jail does not need: the new file system is mounted over it
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}

_libc = ctypes.CDLL(None, use_errno=True)


def main(config: dict[str, Any]) -> NoReturn:
    _call("syscall", SYS_CLOSE_RANGE, 3, 0xFFFFFFFF, 0)  # an event loop may leave files open to a process it starts
    os.nice(10)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would print the path of this file
    if config["isolated"]:
        _isolate(config)
    _die_with_parent()
    _limit(config)
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if config["isolated"]:
        _filter_system_calls()
    environment = ENVIRONMENT | ({} if config["isolated"] else {"HOME": os.getcwd(), "TMPDIR": os.getcwd()})
    python = config["python"]
    os.execve(python, [python, "-I", "-S", "-B", "-X", "utf8", "-c", config["main"]], environment)


def _isolate(config: dict[str, Any]) -> None:
    """Returns in the process that is to become the code; the others wait for it."""
    if platform.machine() not in AUDIT_ARCH:
        sys.exit(f"not on {platform.machine()}")
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    as_root = os.geteuid() == 0
    _unshare(as_root)
    _die_with_parent()
    if os.getppid() != config["parent"]:
        sys.exit("the server is gone")
    _fork_and_wait()  # the child is process 1
    _call("syscall", SYS_KEYCTL[platform.machine()], KEYCTL_JOIN_SESSION_KEYRING, None, ignore=True)
    socket.sethostname("jail")
    _make_file_system(config["folders"], config["tmp_bytes"])
    if as_root:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    _die_with_parent()
    _fork_and_wait()


def _unshare(as_root: bool) -> None:
    """Enters new namespaces. Only a process outside may map more than one user, so a child does it."""
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os._exit(0 if os.read(ready, 1) and _map_users(os.getppid(), as_root) else 1)
    try:
        _call("unshare", CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)
        os.write(go, b"x")
    finally:
        os.close(go)
        _, status = os.waitpid(child, 0)
    if status != 0:
        sys.exit("the users of the namespace cannot be mapped")


def _map_users(pid: int, as_root: bool) -> bool:
    outside = {"uid_map": os.geteuid(), "gid_map": os.getegid()}
    try:
        if not as_root:
            _write(f"/proc/{pid}/setgroups", "deny")
        for name, own in outside.items():
            _write(f"/proc/{pid}/{name}", f"0 0 1\n{USER} {NOBODY} 1" if as_root else f"{USER} {own} 1")
    except OSError:
        return False
    return True


def _fork_and_wait() -> None:
    """Returns in the child; the parent reaps all children and ends as this one ends."""
    child = os.fork()
    if child == 0:
        return
    pid, status = 0, 0
    while pid != child:
        pid, status = os.wait()
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _make_file_system(folders: list[str], tmp_bytes: int) -> None:
    """Makes a new root with the needed folders, read-only, and drops the old one."""
    _call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    _call("mount", b"none", BASE.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"size=1m,mode=755")
    root = f"{BASE}/jail"
    for path in (*SYSTEM, *folders, *DEVICES):
        _show(path, root + path)
    os.mkdir(f"{root}/tmp")
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID)
    size = ctypes.sizeof(attributes)
    _call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, BASE.encode(), AT_RECURSIVE, attributes, size)
    options = f"size={tmp_bytes},nr_inodes=4096,mode=1777".encode()
    _call("mount", b"none", f"{root}/tmp".encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options)
    os.chdir(BASE)
    _call("syscall", SYS_PIVOT_ROOT[platform.machine()], b".", b".")
    _call("umount2", b".", MNT_DETACH)
    os.chroot("/jail")  # below the root of the namespace: from here no process may make user namespaces
    os.chdir("/tmp")


def _show(path: str, where: str) -> None:
    """Makes a path of the old file system visible in the new one, links as links."""
    if os.path.lexists(where) or not os.path.exists(path):
        return
    os.makedirs(os.path.dirname(where), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), where)
        return
    if os.path.isdir(path):
        os.mkdir(where)
    else:
        _write(where, "")
    _call("mount", path.encode(), where.encode(), None, MS_BIND | MS_REC, None)


def _limit(config: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_AS: config["memory_bytes"],
        resource.RLIMIT_CPU: config["cpu_s"],
        resource.RLIMIT_FSIZE: config["tmp_bytes"],
        resource.RLIMIT_NOFILE: 32,  # each file may be a socket with a buffer
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if config["isolated"]:
        limits[resource.RLIMIT_NPROC] = config["processes"] + 2  # outer and init; counted within the namespace
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("k", ctypes.c_uint)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction))]


def _filter_system_calls() -> None:
    """Refused calls fail with EPERM; calls by another architecture's numbers end the process."""
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
    allow, refuse, end = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000  # SECCOMP_RET_ALLOW, _ERRNO, _KILL_PROCESS
    machine = platform.machine()
    column = [*AUDIT_ARCH].index(machine)
    program = [(load, 0, 0, 4), (equal, 1, 0, AUDIT_ARCH[machine]), (give, 0, 0, end), (load, 0, 0, 0)]
    program += [(at_least, 0, 1, X32), (give, 0, 0, refuse)]
    socket_call = [(load, 0, 0, 16)]  # the low half of the first argument
    for family in SOCKET_FAMILIES:
        socket_call += [(equal, 0, 1, family), (give, 0, 0, allow)]
    socket_call.append((give, 0, 0, refuse))
    program += [(equal, 0, len(socket_call), SOCKET[machine]), *socket_call]
    option_call = [(load, 0, 0, 24), (equal, 1, 0, SOL_SOCKET), (give, 0, 0, allow), (load, 0, 0, 32)]
    for option in SOCKET_BUFFERS:
        option_call += [(equal, 0, 1, option), (give, 0, 0, refuse)]
    option_call.append((give, 0, 0, allow))
    program += [(equal, 0, len(option_call), SETSOCKOPT[machine]), *option_call]
    for numbers in REFUSED.values():
        program += [(equal, 0, 1, numbers[column]), (give, 0, 0, refuse)]
    program.append((give, 0, 0, allow))
    instructions = (_Instruction * len(program))(*(_Instruction(*line) for line in program))
    _call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(_Program(len(program), instructions)), 0, 0)


def _die_with_parent() -> None:
    """The setting is lost when the user changes, so it is repeated after each change."""
    _call("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _call(name: str, *arguments: Any, ignore: bool = False) -> None:
    if getattr(_libc, name)(*arguments) == -1 and not ignore:
        error = ctypes.get_errno()
        sys.exit(f"{name} failed: {os.strerror(error)}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
