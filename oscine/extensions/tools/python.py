"""gpt-oss's python tool: code runs in a fresh, jailed interpreter, and its output is the result.

This module has the limits and the declaration; python_jail.py is the jail.
"""

import asyncio
import json
import logging
import math
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscine.chat.messages import ToolNamespace
from oscine.chat.toolbox import CodeRun, Tool, ToolResult
from oscine.settings.config import ToolOptions
from oscine.system.owned_folder import Kind, make_temporary

logger = logging.getLogger(__name__)

NAMESPACE = "python"
_WASTE = Kind("python", None)  # what the code of one run leaves behind
_FOLDER = Path(__file__).parent
_JAIL = _FOLDER / "python_jail.py"
_MAIN = _FOLDER / "python_main.py"
_PROCESSES = 8  # and threads
_TMP_BYTES = 64 << 20
_SHOWN_BYTES = 16_384  # of the output, for the model
_FLOOD_BYTES = 16 << 20  # an output that long ends the run
_FLOODED = f"it wrote more than {_FLOOD_BYTES >> 20} MiB"
_READ_BYTES = 65_536
_FAREWELL_S = 1.0  # for the last output to arrive once all is killed

_DESCRIPTION = """\
Use this tool to execute Python code in your chain of thought. The user sees neither the code nor its output.

A message to python is run as one script in a fresh interpreter: nothing is kept from earlier messages. You get \
what it prints, and the value of its last line if that is an expression. It has the standard library of Python \
{version}, no network, {memory_mib} MiB of memory and {seconds:g} seconds. Files can be written in /tmp, and are gone \
afterwards."""


@dataclass(frozen=True, slots=True)
class PythonRun:
    output: str  # stdout and stderr in order of arrival; both ends of a long one
    ending: str  # the reason why it ended, unless the code ended by itself
    failed: bool


class Jail:
    """Runs code, a few at a time."""

    def __init__(self, options: ToolOptions) -> None:
        self._options = options
        self._isolated = options.python_isolation == "namespaces"
        self._slots = asyncio.Semaphore(options.python_runs)

    async def check(self) -> None:
        """Raises ValueError if this machine cannot make the jail."""
        try:
            run = await self.run("print(6 * 7)")
        except OSError as error:
            raise ValueError(f"--tools python: {error}") from None
        if run.output != "42\n":
            reason = (run.output + run.ending).strip() or "no output"
            raise ValueError(
                f"--tools python: code cannot be isolated here ({reason}). That takes Linux 5.14 or newer and the "
                "right to make user namespaces; --python-isolation none goes without"
            )

    async def run(self, code: str) -> PythonRun:
        async with self._slots, self._folder() as folder:
            process = await asyncio.create_subprocess_exec(
                *(os.path.realpath(sys.executable), "-I", "-S", "-B", str(_JAIL), json.dumps(self.config())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=folder,
                env={},
                start_new_session=True,
            )
            return await self._watch(process, code)

    def config(self) -> dict[str, Any]:
        """The argument of python_jail.py."""
        return {
            "isolated": self._isolated,
            "parent": os.getpid(),
            "python": os.path.realpath(sys.executable),
            "folders": [str(Path(sys.base_prefix).resolve()), str(Path(sys.base_exec_prefix).resolve())],
            "main": _MAIN.read_text(),
            "memory_bytes": self._options.python_memory_bytes,
            # per process, for threads: the clock ends all others first
            "cpu_s": math.ceil(self._options.python_timeout_s) + 1,
            "processes": _PROCESSES,
            "tmp_bytes": _TMP_BYTES,
        }

    @asynccontextmanager
    async def _folder(self) -> AsyncIterator[str]:
        """The working folder. Isolated code has its own file system, and never sees it."""
        if self._isolated:
            yield "/"
            return
        folder = await asyncio.to_thread(make_temporary, _WASTE, logger.warning)
        try:
            (folder.path / "work").mkdir()
            yield str(folder.path / "work")
        finally:
            await asyncio.to_thread(folder.remove, logger.warning)

    async def _watch(self, process: asyncio.subprocess.Process, code: str) -> PythonRun:
        assert process.stdin is not None
        assert process.stdout is not None
        output = _Output()
        reading = asyncio.ensure_future(output.read(process.stdout))
        ended = asyncio.ensure_future(process.wait())
        ending = ""
        try:
            process.stdin.write(code.encode(errors="replace"))
            process.stdin.close()
            async with asyncio.timeout(self._options.python_timeout_s):
                await asyncio.wait((reading, ended), return_when=asyncio.FIRST_COMPLETED)
                ending = _FLOODED if output.flooded else _signal_name(await ended)
        except TimeoutError:
            ending = f"it ran longer than {self._options.python_timeout_s:g} seconds"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait((reading, ended), timeout=_FAREWELL_S)
            reading.cancel()
            ended.cancel()
            process._transport.close()  # type: ignore[attr-defined]  # a flood leaves its pipe open
        return PythonRun(output.text(), ending, failed=bool(ending or process.returncode))


def _signal_name(status: int) -> str:
    """The signal that ended a process, from its exit status or that of its parent."""
    number = -status if status < 0 else status - 128
    return f"signal {signal.Signals(number).name}" if number in {*signal.Signals} else ""


class _Output:
    """Both ends of an output, so that no output takes much memory."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._num_bytes = 0

    @property
    def flooded(self) -> bool:
        return self._num_bytes > _FLOOD_BYTES

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Reads to the end, or until the output is too long."""
        while not self.flooded and (data := await stream.read(_READ_BYTES)):
            self._num_bytes += len(data)
            room = _SHOWN_BYTES // 2 - len(self._head)
            self._head += data[:room]
            self._tail += data[room:]
            del self._tail[: -_SHOWN_BYTES // 2]

    def text(self) -> str:
        left_out = self._num_bytes - len(self._head) - len(self._tail)
        cut = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b""
        return (self._head + cut + self._tail).decode(errors="replace")


class PythonTool(Tool):
    """Keeps nothing between calls."""

    def __init__(self, jail: Jail, options: ToolOptions) -> None:
        self._jail = jail
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        memory_mib, seconds = options.python_memory_bytes >> 20, options.python_timeout_s
        description = _DESCRIPTION.format(version=version, memory_mib=memory_mib, seconds=seconds)
        self.namespace = ToolNamespace(NAMESPACE, description)

    async def call(self, recipient: str, content: str) -> ToolResult:
        run = await self._jail.run(content)
        ended = f"[ended: {run.ending}]" if run.ending else ""
        logs = "\n".join(part for part in (run.output.removesuffix("\n"), ended) if part)
        return ToolResult(logs or "[no output]", CodeRun(content, logs), is_error=run.failed)
