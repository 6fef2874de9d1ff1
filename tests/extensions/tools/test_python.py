"""The python tool, and attacks on its jail. Each attack is real code, run by the server's own means."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from oscine.chat.toolbox import CodeRun, ToolResult
from oscine.extensions.tools import python_jail
from oscine.extensions.tools.python import Jail, PythonRun, PythonTool
from oscine.settings.config import ToolOptions
from oscine.system.owned_folder import Kind, make_temporary
from tests.waiting import until, wait_until

JAIL = Path(python_jail.__file__)
MIB = 1 << 20
# As the limit on address space it marks the processes of this run among all others of the machine.
MARK = 512 * MIB + (os.getpid() % 4096) * 4096


def options(timeout_s: float = 20.0, isolation: str = "namespaces") -> ToolOptions:
    return ToolOptions(("python",), python_timeout_s=timeout_s, python_memory_bytes=MARK, python_isolation=isolation)  # type: ignore[arg-type]


@pytest.fixture(scope="module", autouse=True)
def _needs_namespaces() -> None:
    try:
        asyncio.run(Jail(options()).check())
    except ValueError as error:
        pytest.skip(str(error))


def run(code: str, timeout_s: float = 20.0, isolation: str = "namespaces") -> PythonRun:
    return asyncio.run(Jail(options(timeout_s, isolation)).run(code))


def call(code: str) -> ToolResult:
    return asyncio.run(PythonTool(Jail(options()), options()).call("python", code))


def survivors() -> list[int]:
    """Processes that code of these tests left behind."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.rlimit(psutil.RLIMIT_AS)[0] == MARK and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.fixture(autouse=True)
def _leaves_nothing(_needs_namespaces: None) -> Iterator[None]:
    yield
    wait_until(lambda: not survivors(), "no process left behind")


def test_shows_what_is_printed_and_the_last_value() -> None:
    result = call("import math\nprint('hi')\nx = math.factorial(5)\nx")
    assert result == ToolResult("hi\n120", CodeRun("import math\nprint('hi')\nx = math.factorial(5)\nx", "hi\n120"))


def test_an_error_shows_the_code_alone() -> None:
    result = call("def f(x):\n    return 1 / x\n\nf(0)")
    assert result.is_error
    assert result.text.startswith('Traceback (most recent call last):\n  File "main.py", line 4, in <module>\n    f(0)')
    assert result.text.endswith("ZeroDivisionError: division by zero")
    assert call("def f(:").text.startswith('  File "main.py", line 1')


def test_nothing_is_kept_between_runs() -> None:
    assert call("x = 1; open('/tmp/kept', 'w').write('kept'); print('ok')").text == "ok"
    assert "NameError" in call("x").text
    assert call("import os; os.listdir('/tmp')").text == "[]"


def test_odd_code() -> None:
    assert call("").text == "[no output]"
    assert call("print('é' + chr(0x1F426))").text == "é🐦"
    assert "EOFError" in call("input()").text
    assert "null byte" in call("x\0").text
    assert call("raise SystemExit(3)").is_error
    assert call("import sys; print('one', file=sys.stderr); print('two')").text == "one\ntwo"
    assert call("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nA(1)").text == "A(x=1)"
    assert call("from threading import Thread\nt = Thread(target=print, args=(7,)); t.start(); t.join()").text == "7"


def test_a_loop_is_ended() -> None:
    endless = run("print('begun')\nwhile True: pass", timeout_s=3.0)
    assert endless == PythonRun("begun\n", "it ran longer than 3 seconds", failed=True)


def test_a_loop_that_hides_its_pipes_and_catches_signals_is_ended() -> None:
    code = (
        "import os, signal\nos.close(1); os.close(2); os.setsid()\n"
        "for s in (1, 2, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    )
    assert run(code, timeout_s=1.0).ending == "it ran longer than 1 seconds"


def test_a_fork_bomb_is_contained() -> None:
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert run(code, timeout_s=1.5).ending == "it ran longer than 1.5 seconds"
    count = "import os, time\nn = 1\ntry:\n    while os.fork(): n += 1\n    time.sleep(9)\nexcept OSError: print(n)"
    assert int(run(count).output) <= 9


def test_a_memory_bomb_is_refused() -> None:
    assert "MemoryError" in run("x = 'a' * (600 << 20)").output
    assert "MemoryError" in run("x = []\nwhile True: x.append(bytes(1 << 20))").output
    assert "Cannot allocate memory" in run("import mmap; mmap.mmap(-1, 1 << 30)").output


def test_memory_that_no_limit_counts_cannot_be_had() -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for name, arguments in [("memfd_create", (b"x", 0)), ("shmget", (0, 1 << 20, 0o1600)), ("msgget", (0, 0o1600))]:
    print(name, getattr(libc, name)(*arguments), os.strerror(ctypes.get_errno()))
for number in (0x40000000 + 39, 425, 447):  # getpid by the numbers of x32, io_uring_setup, memfd_secret
    print(libc.syscall(number, 0, 0), os.strerror(ctypes.get_errno()))"""
    assert all(line.endswith("-1 Operation not permitted") for line in run(code).output.splitlines())


def test_a_flood_of_output_is_cut() -> None:
    flood = run("for _ in range(1000): print('x' * (1 << 20))")
    assert flood.ending == "it wrote more than 16 MiB"
    assert len(flood.output) < 20_000
    shown = run("for i in range(100_000): print(i)").output
    assert shown.startswith("0\n1\n2\n")
    assert shown.endswith("\n99998\n99999\n")
    assert "[... 572506 bytes left out ...]" in shown  # 588,890 were written


def test_files_are_bounded() -> None:
    assert "File too large" in run("with open('/tmp/a', 'wb') as f:\n    while True: f.write(bytes(1 << 20))").output
    many = "n = 0\nwhile True:\n    open(f'/tmp/{n}', 'wb').write(bytes(1 << 20)); n += 1"
    assert "No space left on device" in run(many).output
    assert "No space left on device" in run("n = 0\nwhile True:\n    open(f'/tmp/{n}', 'w').close(); n += 1").output
    assert "Too many open files" in run("x = [open('/dev/null') for _ in range(100)]").output


@pytest.mark.parametrize("path", ["/x", "/usr/x", "/etc/x", "/dev/x", "/tmp/../x", f"{sys.base_prefix}/x", __file__])
def test_nothing_outside_can_be_written(path: str) -> None:
    assert "OSError" in (out := run(f"open({path!r}, 'w')").output) or "FileNotFoundError" in out
    assert not Path(path).exists() or path == __file__


def test_the_servers_files_and_environment_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OSCINE_API_KEY", "sk-of-the-server")
    (tmp_path / "secret").write_text("sk-of-the-server")
    places = ["/proc", "/proc/1/environ", f"/proc/{os.getpid()}/environ", "/etc/passwd", "/etc/shadow", "/root/.ssh"]
    places += ["/home", "/var", "/run", "/sys", "/proc/self/root", "/dev/shm", "/dev/sda", "/dev/mem"]
    places += [str(tmp_path / "secret"), __file__, str(Path(__file__).parents[3])]
    seen = run(f"import os\nprint(dict(os.environ))\n[p for p in {places!r} if os.path.exists(p)]").output
    environment, present = seen.splitlines()
    assert "sk-of-the-server" not in seen
    assert set(eval(environment)) == {"PATH", "HOME", "TMPDIR", "LANG"}
    assert eval(present) == []


@pytest.mark.parametrize("loop", [asyncio, uvloop], ids=["asyncio", "uvloop"])  # of which one closes no files
@pytest.mark.parametrize("isolation", ["namespaces", "none"])
def test_nothing_of_the_server_is_inherited(loop: Any, isolation: str, tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        code = "import os\nfor fd in range(64):\n    try: os.fstat(fd)\n    except OSError: continue\n    print(fd)"
        run = loop.run(Jail(options(isolation=isolation)).run(f"{code}\nlen(os.environ)"))
    assert run.output.split() == ["0", "1", "2", "4"]


def test_there_is_no_network(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        path = str(tmp_path / "socket")
        unix.bind(path)
        unix.listen()
        with socket.socket(socket.AF_UNIX) as abstract:
            abstract.bind(f"\0oscine-{os.getpid()}")
            abstract.listen()
            code = f"""
import socket
for family, address in [
    (socket.AF_INET, {tcp.getsockname()!r}), (socket.AF_INET, ("1.1.1.1", 53)), (socket.AF_INET6, ("::1", 80)),
    (socket.AF_UNIX, {path!r}), (socket.AF_UNIX, {abstract.getsockname()!r}),
]:
    try:
        socket.socket(family).connect(address)
        print("connected", address)
    except OSError as error:
        pass
try:
    print(socket.getaddrinfo("localhost.example.com", 80))
except OSError:
    pass
print(socket.if_nameindex(), socket.gethostname())"""
            assert run(code).output == "[(1, 'lo')] jail\n"


def test_sockets_that_no_namespace_holds_back_cannot_be_had() -> None:
    code = """
import errno, socket
for family in (38, 40, 44):  # the kernel's cryptography, the host of a virtual machine, raw frames
    try:
        socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        print(errno.errorcode[error.errno])"""
    assert run(code).output == "EPERM\n" * 3


def test_buffers_of_sockets_stay_as_they_are() -> None:
    code = """
import errno, socket
a, b = socket.socketpair()
a.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
    try:
        a.setsockopt(socket.SOL_SOCKET, option, 1 << 22)
    except OSError as error:
        print(errno.errorcode[error.errno])
pairs = []
try:
    while True:
        pairs.append(socket.socketpair())
except OSError as error:
    print(errno.errorcode[error.errno], len(pairs) < 16)"""
    assert run(code).output == "EPERM\n" * 4 + "EMFILE True\n"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_process_1_says_nothing_of_the_server(name: str) -> None:
    code = f"import os, signal, time\nos.kill(1, signal.{name})\ntime.sleep(0.2)\nprint('still here')"
    assert run(code) == PythonRun("still here\n", "", False)


def test_nothing_is_left_in_the_background() -> None:
    code = (
        "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        if os.fork() == 0: time.sleep(100)\n        os._exit(0)\nprint('done')"
    )
    assert run(code) == PythonRun("done\n", "", False)
    assert run(code.replace("print('done')", "time.sleep(100)"), timeout_s=1.0).ending
    wait_until(lambda: not survivors(), "no process left behind")


def test_signals_reach_nobody_outside() -> None:
    code = f"""
import os, signal
for pid in (os.getppid(), {os.getpid()}, {os.getppid()}, -{os.getpgrp()}, -1):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as error:
        print(type(error).__name__)
print("still here")"""
    *errors, last = run(code).output.splitlines()  # its parent is process 1 of the namespace, and immune
    assert (errors, last) == (["ProcessLookupError"] * 4, "still here")
    assert run("import os; os.killpg(os.getpgid(0), 9)").ending == "signal SIGKILL"


def test_privileges_cannot_be_had() -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, *arguments):
    result = getattr(libc, name)(*arguments)
    print(name, result, os.strerror(ctypes.get_errno()) if result == -1 else "")
attempt("setuid", 0)
attempt("unshare", 0x10000000)
attempt("unshare", 0x20000)
attempt("mount", b"none", b"/tmp", b"tmpfs", 0, None)
attempt("umount2", b"/tmp", 2)
attempt("chroot", b"/tmp")
attempt("ptrace", 16, 1, None, None)
attempt("mknod", b"/tmp/mem", 0o20600, 0x101)
attempt("sethostname", b"x", 1)
attempt("setns", 0, 0)
os.getuid(), os.getgid(), os.getgroups()"""
    *attempts, user = run(code).output.splitlines()
    assert [line for line in attempts if " -1 " not in line] == []
    assert eval(user)[:2] == (1000, 1000)


def test_crashes_are_told() -> None:
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)").ending == "signal SIGSEGV"
    assert call("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)").text == "[ended: signal SIGSEGV]"


def test_a_cancelled_run_is_gone() -> None:
    async def cancel() -> None:
        jail = Jail(options())
        task = asyncio.create_task(jail.run("import time; time.sleep(100)"))
        await until(lambda: bool(survivors()), "the code's process")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await jail.run("1")).output == "1\n"

    asyncio.run(cancel())


def test_code_dies_with_the_server() -> None:
    code = (
        "import asyncio\nfrom oscine.settings.config import ToolOptions\n"
        "from oscine.extensions.tools.python import Jail\n"
        f"options = ToolOptions(('python',), python_memory_bytes={MARK})\n"
        "asyncio.run(Jail(options).run('import os, time; os.setsid(); time.sleep(100)'))"
    )
    server = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: bool(survivors()), "the code's process")
    server.send_signal(signal.SIGKILL)
    server.wait()
    wait_until(lambda: not survivors(), "no process left behind")


def test_a_few_run_at_once() -> None:
    async def several() -> list[PythonRun]:
        jail = Jail(ToolOptions(("python",), python_runs=2, python_memory_bytes=MARK))
        return await asyncio.gather(*(jail.run(str(i)) for i in range(5)))

    assert [run.output for run in asyncio.run(several())] == ["0\n", "1\n", "2\n", "3\n", "4\n"]


def test_without_isolation_there_are_still_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSCINE_API_KEY", "sk-of-the-server")
    code = "import os; print('OSCINE_API_KEY' in os.environ); open('a', 'w').close(); os.getcwd()"
    absent, folder = run(code, isolation="none").output.splitlines()
    assert absent == "False"
    assert not Path(eval(folder)).exists()
    assert "MemoryError" in run("x = 'a' * (600 << 20)", isolation="none").output
    assert run("while True: pass", 1.0, isolation="none").ending == "it ran longer than 1 seconds"
    background = "import os, time\nif os.fork() == 0: time.sleep(100)\nprint('done')"
    assert run(background, 3.0, isolation="none") == PythonRun("done\n", "it ran longer than 3 seconds", failed=True)


def test_what_code_leaves_is_removed_also_if_the_server_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = make_temporary(Kind("python", None))
    (left.path / "work" / "deep").mkdir(parents=True)
    (left.path / "work" / "deep" / "link").symlink_to("/etc")
    left.close()
    code = f"import os; os.remove('../lock'); os.symlink('/etc', 'link'); print(os.path.exists({str(left.path)!r}))"
    assert run(code, isolation="none").output == "False\n"
    assert list(tmp_path.iterdir()) == []


def test_without_a_temporary_folder_the_start_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    jail = Jail(ToolOptions(("python",), python_isolation="none"))
    with pytest.raises(ValueError, match=r"--tools python: .*; TMPDIR names another place"):
        asyncio.run(jail.check())


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
def test_a_machine_that_cannot_isolate_is_refused() -> None:
    check = (
        "import asyncio\nfrom oscine.settings.config import ToolOptions\n"
        "from oscine.extensions.tools.builtin import BuiltinTools\n"
        "asyncio.run(BuiltinTools(ToolOptions(('python',))).start())"
    )
    forbid = f'echo 0 > /proc/sys/user/max_user_namespaces; exec "{sys.executable}" -c "$0"'
    done = subprocess.run(["unshare", "-Ur", "sh", "-c", forbid, check], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ValueError: --tools python: code cannot be isolated here (unshare failed: No space" in done.stderr
    assert "--python-isolation none" in done.stderr


SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin")


@pytest.mark.skipif(os.geteuid() != 0 or SYSTEM_PYTHON is None, reason="needs root, and a Python that others may run")
def test_a_server_that_is_not_root_isolates_as_well() -> None:
    """Runs the jail's script as nobody, with the system's Python."""
    assert SYSTEM_PYTHON is not None
    jail = Jail(options())
    config = jail.config() | {"python": SYSTEM_PYTHON, "folders": [], "parent": os.getpid()}
    code = """
import os, socket, time
print(os.getuid(), os.path.exists("/root"), os.path.exists("/proc"))
for attempt in (lambda: open("/usr/x", "w"), lambda: socket.create_connection(("127.0.0.1", 1))):
    try:
        attempt()
    except OSError as error:
        print(error.strerror)
n = 1
try:
    while os.fork(): n += 1
    time.sleep(9)
except OSError:
    print(n <= 9)"""
    command = [SYSTEM_PYTHON, "-I", "-S", "-c", JAIL.read_text(), json.dumps(config)]
    nobody: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": [], "env": {}, "cwd": "/"}
    done = subprocess.run(command, input=code, capture_output=True, text=True, check=False, **nobody)
    assert done.stdout.splitlines() == ["1000 False False", "Read-only file system", "Network is unreachable", "True"]
