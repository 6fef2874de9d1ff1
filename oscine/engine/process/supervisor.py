"""Keeps one engine process alive: starts it, notices its end, starts it again with a growing pause."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from oscine.engine.process.member import GroupEndedError, Member
from oscine.engine.process.parent import STACKS, STOP
from oscine.engine.wire.messages import Launch
from oscine.settings.config import EngineOptions
from oscine.system.python_child import COMPUTING, child_environment, module_command

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1  # doubles with every failure in a row
_LONGEST_PAUSE_S = 10.0
_STABLE_S = 60.0  # an engine that served this long has recovered
_MAX_FAILED_STARTS = 3  # in a row, before the engine is given up
STARVED_S = 600.0  # how long an engine that was ready is retried while descriptors, memory or processes lack
_FAREWELL_S = 2.0  # granted to an engine that serves, to tell its clients that it ends
_STACKS_S = 3.0  # granted to a hung process, to write its stacks and end; one that is stopped cannot
_EXIT_S = 5.0  # granted after stdin was closed, before the process is killed


class EngineSupervisor:
    """Owns an engine process. The process ends when its stdin does, so it never outlives this one."""

    def __init__(
        self, options: EngineOptions, on_exit: Callable[[str, bool], None], member: Member | None = None
    ) -> None:
        """`on_exit(reason, gave_up)` is called each time the process has ended unasked. `member`: of a group."""
        self._options, self._member = options, member
        if member is not None:
            member.kill = self.kill
        self._running: asyncio.Task[None] | None = None  # made by start()
        self._threads = {} if options.num_threads is None else {"OMP_NUM_THREADS": str(options.num_threads)}
        self._on_exit = on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._ready_at: float | None = None
        self._was_ready = False  # this process, or an earlier one
        self._failures = self._failed_starts = 0  # in a row
        self._starved_at: float | None = None  # time since which no process can be started
        self._killed_for: str | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def mark_ready(self) -> None:
        self._ready_at, self._was_ready = time.monotonic(), True

    def start(self, address: str) -> None:
        """`address`: the endpoint that the engine binds."""
        self._running = asyncio.create_task(self._run(Launch(address, self._options)))

    async def _run(self, launch: Launch) -> None:
        """Until stop() or until the engine has failed to start too often."""
        try:
            await self._keep_alive(launch)
        finally:
            if self._member is not None:
                self._member.leave()

    async def _keep_alive(self, launch: Launch) -> None:
        while not self._stopping:
            self._ready_at = self._killed_for = None
            try:
                process = await self._start(launch)
            except GroupEndedError as error:
                reason, gave_up = str(error), True
            except Exception as error:  # no descriptors, memory or processes are left
                reason, gave_up = f"no engine process can be started: {error}", self._starve()
            else:
                code = await process.wait()
                reason = self._killed_for or _describe(code, while_starting=self._ready_at is None)
                gave_up = self._count_end()
            if self._member is not None:
                self._member.end()
            if self._stopping:
                return
            logger.error("%s; %s", reason, "it is given up" if gave_up else "another one is started")
            self._on_exit(reason, gave_up)
            if gave_up:
                return
            await asyncio.sleep(pause_s(self._failures))

    def _count_end(self) -> bool:
        """Counts the end of a process. Returns whether the engine is given up."""
        served_s = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
        self._failed_starts = self._failed_starts + 1 if self._ready_at is None else 0
        self._failures = 1 if served_s >= _STABLE_S else self._failures + 1
        self._starved_at = None
        return self._failed_starts >= _MAX_FAILED_STARTS

    def _starve(self) -> bool:
        """Counts a process that could not be started. Returns whether the engine is given up.

        An engine that has been ready before waits longer: other processes may release what they took.
        """
        self._failures += 1
        if not self._was_ready:
            self._failed_starts += 1
            return self._failed_starts >= _MAX_FAILED_STARTS
        if self._starved_at is None:
            self._starved_at = time.monotonic()
        return time.monotonic() - self._starved_at >= STARVED_S

    async def _start(self, launch: Launch) -> asyncio.subprocess.Process:
        handle = None if self._member is None else await self._member.begin()
        # What libraries print goes to stderr: stdout belongs to the parent's own output.
        self._process = process = await asyncio.create_subprocess_exec(
            *module_command("oscine.engine.process.server"),
            stdin=asyncio.subprocess.PIPE,
            stdout=2,
            env=COMPUTING | child_environment() | self._threads,
            pass_fds=() if handle is None else handle.descriptors,
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(msgspec.structs.replace(launch, handle=handle)) + b"\n")
        return process

    def kill(self, reason: str) -> None:
        """Ends a process that is of no use; it is started again as after any other end."""
        if self._process is not None and self._process.returncode is None:
            self._killed_for = reason
            self._process.kill()

    def end_hung(self, reason: str) -> None:
        """Makes a hung process write the stacks of its threads to stderr and end; kills it if it cannot."""
        process = self._process
        if process is not None and process.returncode is None and self._killed_for is None:
            self._killed_for = reason
            logger.error("%s (process %s): the stacks of its threads follow", reason, process.pid)
            process.send_signal(STACKS)
            asyncio.get_running_loop().call_later(_STACKS_S, _kill_if_alive, process)

    def give_up(self) -> None:
        """The process will end and shall not be started again."""
        self._stopping = True

    async def stop(self) -> None:
        """Ends the process, and waits for it."""
        self.give_up()
        process = self._process
        if process is not None and process.returncode is None:
            await self._end(process)
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,))

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """In order if the engine can, at once if it does nothing, by force if it does not even hear."""
        assert process.stdin is not None
        if self._ready_at is not None:
            process.stdin.write(STOP)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _FAREWELL_S)
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _EXIT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _kill_if_alive(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()


def pause_s(failures: int) -> float:
    """The pause before the next attempt, after this number of consecutive failures."""
    return float(min(_FIRST_PAUSE_S * 2 ** min(failures - 1, 20), _LONGEST_PAUSE_S))


def _describe(code: int, while_starting: bool) -> str:
    how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
    return f"the engine process {how}{' while starting' if while_starting else ''}"
