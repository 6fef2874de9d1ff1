"""Compiles all kernels that some code launches at once, on all cores, instead of one after the other as they come."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton


class _Rehearsal(triton.AsyncCompileMode):  # type: ignore[misc]
    """Triton launches what submit returns; here that is nothing."""

    def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> None:
        if key not in self.future_kernels:
            super().submit(key, compile_fn, finalize_fn)


@contextmanager
def compile_together() -> Iterator[None]:
    """Within it, a kernel that is not compiled yet is not launched; at the end all of these are compiled.

    What is in the kernels' outputs meanwhile is undefined, so nothing but other kernels may use them as indices.
    """
    with ThreadPoolExecutor(os.cpu_count()) as threads, _Rehearsal(threads):
        yield
