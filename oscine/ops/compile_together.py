"""Compiles all kernels that some code launches at once, on all cores, instead of one after the other as they come.

Triton holds Python's lock for most of a compilation, so it is done in processes; they share Triton's cache on disk.
"""

import hashlib
import inspect
import os
import pickle
import queue
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.cache import get_cache_manager

from oscine.ops.compile_worker import Job, send
from oscine.system.python_child import bound_command, child_environment

MAX_WORKERS = 16
_LONGEST_NAME = 150  # of a kernel, in the names of Triton's files


class Compilers:
    """Worker processes, started at once or as kernels need them.

    Start them at once if kernels are likely to be missing: they take seconds to be ready, and what is asked of them
    waits. If all kernels are in the cache, their imports only take time from everything else. None but those of one
    rank need any: the others find what it has compiled in the cache.
    """

    def __init__(self, count: int | None = None, *, at_once: bool = True) -> None:
        if count is None:
            count = max(1, min(MAX_WORKERS, (os.cpu_count() or 1) - 2))
        self._count = count
        self._all: list[subprocess.Popen[bytes]] = []
        self._idle: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()  # None: not yet started
        for _ in range(count):
            self._idle.put(self._started() if at_once else None)

    def _started(self) -> "subprocess.Popen[bytes]":
        command, pipe = bound_command("oscine.ops.compile_worker"), subprocess.PIPE
        worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=child_environment())
        self._all.append(worker)
        return worker

    @contextmanager
    def compile_together(self) -> Iterator[None]:
        """Within it, no kernel is launched; at the end the workers have compiled those that were not.

        A kernel that was compiled before, for another engine of this process, would read memory that is not written.
        The kernels' outputs are zeros, which torch may use as indices.
        """
        with ThreadPoolExecutor(max(1, self._count)) as threads, _Rehearsal(threads, self), _Zeros():
            yield

    def fill_cache(self, job: bytes) -> None:
        """Waits for a worker, then for it to compile. If it fails, the cache lacks the kernel, and that is all."""
        worker = self._idle.get()
        try:
            worker = worker or self._started()
            assert worker.stdin is not None
            assert worker.stdout is not None
            send(job, worker.stdin)
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


def stamp_of(shapes: str) -> Path:
    """A file in Triton's cache: where it is, a start whose kernels depend on `shapes` has compiled all of them.

    Its name depends on the sources of the ops and on torch's version too. It is a hint: kernels may still be missing.
    """
    digest = hashlib.sha256(f"{shapes} {torch.__version__}".encode())
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return Path(triton.knobs.cache.dir) / f"oscine-{digest.hexdigest()[:32]}"


def leave(stamp: Path) -> None:
    """Without a place for it, the next start has its workers at once."""
    with suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()


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

    def __enter__(self) -> Any:
        self._run, self._do_compile = triton.JITFunction.run, triton.JITFunction._do_compile
        run, do_compile, asked = self._run, self._do_compile, self._asked

        def ask_once(function: Any, key: Any, signature: Any, device: int, *others: Any) -> Any:
            """Before 3.9, Triton would hash a kernel anew at each launch until it is compiled, which takes a ms."""
            do_compile(function, key, signature, device, *others)
            kernels = function.device_caches[device][0]
            if kernels.get(key) is None:
                kernels[key] = _UNDER_WAY
                asked.append((kernels, key))

        triton.JITFunction.run = lambda function, *args, **named: run(function, *args, **{**named, "warmup": True})
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
            super().submit(key, lambda: self._compile(key, compile_fn), *ends)

    def _compile(self, key: str, compile_fn: Callable[[], Any]) -> Any:
        """`key`: its hash names the kernel's folder in the cache."""
        name, job = _job(compile_fn)
        if job is not None and not _is_cached(key, name):
            self._compilers.fill_cache(job)
        return compile_fn()


def _is_cached(key: str, name: str) -> bool:
    """Whether Triton will find the kernel. No worker is asked for it then, as that one may still be importing torch."""
    folder = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return folder.get_group(f"{name[:_LONGEST_NAME]}.json") is not None


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
