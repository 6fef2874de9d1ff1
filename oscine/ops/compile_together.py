"""Compiles all kernels that some code launches at once, on all cores, instead of one after the other as they come.

Triton holds Python's lock for most of a compilation, so it is done in processes; they share Triton's cache on disk.
"""

import hashlib
import inspect
import os
import pickle
import queue
import secrets
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import CompiledKernel
from triton.runtime.cache import get_cache_manager, triton_key

from oscine.ops.compile_worker import Job, send
from oscine.system.python_child import bound_command, child_environment

MAX_WORKERS = 16
_LONGEST_NAME = 150  # of a kernel, in the names of Triton's files
_BINARIES = (".cubin", ".hsaco")


class _Kernel(NamedTuple):
    hash: str  # names its folder in Triton's cache
    name: str

    @property
    def is_cached(self) -> bool:
        """Whether Triton will find it. If so, no worker is needed, which may still be importing torch."""
        files = get_cache_manager(self.hash).get_group(f"{self.name[:_LONGEST_NAME]}.json") or {}
        return any(name.endswith(_BINARIES) for name in files)  # a group may name files that are gone


class Compilers:
    """Worker processes. They take seconds to be ready, and jobs wait for them.

    Of several ranks one needs workers: the others find what it has compiled in the cache.
    """

    def __init__(self, count: int | None = None) -> None:
        if count is None:
            count = min(MAX_WORKERS, len(os.sched_getaffinity(0)))  # this process waits for them
        self._count = count
        self._all = [_worker() for _ in range(count)]
        self._idle: queue.LifoQueue[subprocess.Popen[bytes]] = queue.LifoQueue()
        for worker in self._all:
            self._idle.put(worker)
        self.kernels: set[_Kernel] = set()  # asked for so far, compiled before or not

    @contextmanager
    def compile_together(self, meanwhile: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Within it, no kernel is launched; at the end the workers have compiled those that were not.

        A kernel that was compiled before, for another engine of this process, would read memory that is not written.
        The kernels' outputs are zeros, which torch may use as indices.

        `meanwhile` is called when each kernel has a worker. Python's lock, if that holds it, delays no compilation.
        """
        with ThreadPoolExecutor(max(1, self._count)) as threads, _Rehearsal(threads, self) as rehearsal:
            with _Zeros():
                yield
            rehearsal.await_workers()
            meanwhile()

    def fill_cache(self, job: bytes, begun: Event | None = None) -> None:
        """Waits for a worker, then for it to compile. If it fails, the cache lacks the kernel, and that is all.

        `begun` is set once a worker has the job.
        """
        worker = self._idle.get()
        try:
            assert worker.stdin is not None
            assert worker.stdout is not None
            send(job, worker.stdin)
            if begun is not None:
                begun.set()
            worker.stdout.read(1)
        except (OSError, ValueError):
            pass  # it is gone, or closed
        finally:
            self._idle.put(worker)

    @property
    def has_workers(self) -> bool:
        return self._count > 0

    def close(self) -> None:
        """Ends them wherever they are. Triton writes a file of its cache whole or not at all."""
        for worker in self._all:
            worker.kill()
        for worker in self._all:
            with suppress(BrokenPipeError), worker:  # closes its pipes, and waits for its end
                pass


def _worker() -> "subprocess.Popen[bytes]":
    command, pipe = bound_command("oscine.ops.compile_worker"), subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=child_environment())


@dataclass(frozen=True, slots=True)
class Stamp:
    """A file in Triton's cache that lists the kernels that a start has compiled.

    A later start whose stamp holds does not look for kernels that are missing. The name is a hash of the shapes, of
    Oscine's sources, and of what Triton's own names of kernels depend on.
    """

    path: Path

    @classmethod
    def of(cls, shapes: str) -> "Stamp":
        """`shapes`: all that decides which kernels there are, but for sources, versions and environment."""
        parts = shapes, torch.__version__, triton_key(), sorted(get_cache_invalidating_env_vars().items())
        digest = hashlib.sha256(repr(parts).encode())
        for file in sorted(Path(__file__).parents[1].rglob("*.py")):
            digest.update(file.read_bytes())
        return cls(Path(triton.knobs.cache.dir) / f"oscine-{digest.hexdigest()[:32]}")

    def holds(self) -> bool:
        """Whether the file is there, and Triton's cache has each kernel that it lists."""
        try:
            lines = self.path.read_text().splitlines()
            return bool(lines) and all(_Kernel(*line.partition(" ")[::2]).is_cached for line in lines)
        except (OSError, ValueError):  # ValueError: a damaged file, also of Triton's
            return False

    def leave(self, compilers: Compilers) -> None:
        """Writes the list, unless the folder is not writable, or no worker was there to be asked."""
        if not compilers.kernels:
            return
        lines = sorted(f"{kernel.hash} {kernel.name}\n" for kernel in compilers.kernels)
        with suppress(OSError):
            part = self.path.with_suffix(f".{secrets.token_hex(8)}")  # containers may share the cache
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_text("".join(lines))
            part.replace(self.path)


class _Zeros(TorchFunctionMode):
    """What is allocated has zeros in place of what was there before."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.zero_() if function in _EMPTY else result


_UNDER_WAY = object()  # in place of a kernel
_EMPTY = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)


class _Rehearsal(triton.AsyncCompileMode):  # type: ignore[misc]
    """Triton compiles where it would launch."""

    def __init__(self, threads: ThreadPoolExecutor, compilers: Compilers) -> None:
        super().__init__(threads)
        self._compilers = compilers
        self._asked: list[tuple[dict[Any, Any], Any]] = []  # kernels of a function, and a key with _UNDER_WAY
        self._begun: list[Event] = []  # of each kernel: set once a worker has it, or none is needed

    def __enter__(self) -> Any:
        self._run, self._do_compile = triton.JITFunction.run, triton.JITFunction._do_compile
        run, do_compile, asked, compilers = self._run, self._do_compile, self._asked, self._compilers

        def ask_once(function: Any, key: Any, signature: Any, device: int, *others: Any) -> Any:
            """Before 3.9, Triton would hash a kernel anew at each launch until it is compiled, which takes a ms."""
            do_compile(function, key, signature, device, *others)
            kernels = function.device_caches[device][0]
            if kernels.get(key) is None:
                kernels[key] = _UNDER_WAY
                asked.append((kernels, key))

        def ask(function: Any, *args: Any, **named: Any) -> Any:
            kernel = run(function, *args, **{**named, "warmup": True})
            if isinstance(kernel, CompiledKernel) and compilers.has_workers:  # before, perhaps for another engine
                compilers.kernels.add(_Kernel(kernel.hash, kernel.src.name))
            return kernel

        triton.JITFunction.run = ask
        triton.JITFunction._do_compile = ask_once
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        triton.JITFunction.run, triton.JITFunction._do_compile = self._run, self._do_compile
        try:
            super().__exit__(*raised)
        finally:
            for kernels, key in self._asked:
                if kernels.get(key) is _UNDER_WAY:
                    del kernels[key]

    def submit(self, key: Any, compile_fn: Callable[[], Any], *ends: Callable[[Any], None]) -> None:
        """`ends`: callbacks for a compilation that succeeded and, since Triton 3.9, for one that failed."""
        if self._compilers.has_workers and key not in self.future_kernels:
            begun = Event()
            self._begun.append(begun)
            super().submit(key, lambda: self._compile(key, compile_fn, begun), *ends)

    def await_workers(self) -> None:
        """Returns when each kernel has a worker, or needs none."""
        for begun in self._begun:
            begun.wait()

    def _compile(self, key: str, compile_fn: Callable[[], Any], begun: Event) -> Any:
        try:
            name, job = _job(compile_fn)
            if job is not None:
                kernel = _Kernel(hashlib.sha256(key.encode()).hexdigest(), name)
                self._compilers.kernels.add(kernel)
                if not kernel.is_cached:
                    self._compilers.fill_cache(job, begun)
        finally:
            begun.set()
        return compile_fn()


def _job(compile_fn: Callable[[], Any]) -> tuple[str, bytes | None]:
    """What Triton's own function would compile: its name, and a Job; None where no other process can be told."""
    values = inspect.getclosurevars(compile_fn).nonlocals
    try:
        source, options = values["src"], values["options"].__dict__
        kernel = source.fn
        arguments = source.signature, source.constants, source.attrs
        name = kernel.module, kernel.fn.__name__, kernel.cache_key
        job = Job(type(source), *name, *arguments, values["target"], options)
        return source.name, pickle.dumps(job)
    except (KeyError, AttributeError, TypeError, pickle.PicklingError):
        return "", None
