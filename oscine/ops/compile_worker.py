"""A process that compiles kernels into Triton's cache on disk: `python -m oscine.ops.compile_worker`.

Reads jobs from standard input, each a pickle behind its length, and answers each with one byte. Needs no GPU. The C
function that launches a kernel is compiled too, if there is a CUDA driver to link it with: Triton 3.6 would do that at
the first launch, one kernel after the other, with some 0.25 s of gcc each. Triton 3.9 has one function for all kernels.
"""

import os
import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import IO, Any

LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Job:
    """What triton.compile is to be called with; a kernel goes by its name."""

    source_type: type  # ASTSource or its like
    module: str
    name: str
    function_hash: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    target: Any
    options: dict[str, Any]


def send(job: bytes, stream: IO[bytes]) -> None:
    stream.write(len(job).to_bytes(LENGTH_BYTES, "little") + job)
    stream.flush()


def _compile(job: Job) -> None:
    import triton
    from triton.backends.nvidia.driver import CudaLauncher

    kernel = getattr(import_module(job.module), job.name)
    # Else Triton would hash it anew. Its hash depends on which functions were hashed before, and names a cached kernel.
    kernel.hash = job.function_hash
    source = job.source_type(kernel, job.signature, job.constants, job.attributes)
    compiled = triton.compile(source, target=job.target, options=job.options)
    CudaLauncher(source, compiled.metadata)


def main() -> None:
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of a compiler must not be read as an answer
    for needed in ("torch", "triton.experimental.gluon"):  # of all kernels; it takes seconds, and jobs come later
        import_module(needed)
    while length := jobs.read(LENGTH_BYTES):
        job = pickle.loads(jobs.read(int.from_bytes(length, "little")))
        with suppress(Exception):  # the parent compiles it again and sees the error
            _compile(job)
        answers.write(b".")
        answers.flush()


if __name__ == "__main__":
    main()
