"""Kernels are compiled by other processes.

The driver here pretends to have a GPU, and fails if a kernel is launched.
"""

import ctypes
import pickle
import signal
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler.compiler import ASTSource, CompiledKernel
from triton.runtime import driver

from oscine.ops.compile_together import Compilers, Stamp
from oscine.ops.compile_worker import Job
from oscine.system.python_child import bound_command


class NoGpu:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", NoGpu())


@triton.jit
def add_one(x, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < count) + 1, mask=i < count)


ONE = tl.constexpr(1)


@triton.jit
def next_of(value):  # type: ignore[no-untyped-def]
    return value + ONE


@triton.jit
def add_one_by_another(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = x + tl.arange(0, BLOCK)
    tl.store(i, next_of(tl.load(i)))


def compiled(kernel: object) -> int:
    """How many variants a launch would find."""
    return sum(isinstance(it, CompiledKernel) for it in kernel.device_caches[0][0].values())  # type: ignore[attr-defined]


@pytest.mark.usefixtures("no_gpu")
def test_what_is_launched_within_is_compiled_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    x, before = torch.zeros(8), compiled(add_one)
    jobs: list[Job] = []
    fill_cache = Compilers.fill_cache
    monkeypatch.setattr(
        Compilers,
        "fill_cache",
        lambda self, job, begun: (jobs.append(pickle.loads(job)), fill_cache(self, job, begun))[1],
    )
    with closing(Compilers(2)) as compilers, compilers.compile_together():
        for block in (8, 16, 8):
            add_one[(1,)](x, 7, BLOCK=block, enable_fp_fusion=True)
            add_one[(1,)](x, 5, BLOCK=block, enable_fp_fusion=True)  # the same kernel: the count is no constant
        assert compiled(add_one) == before
    assert compiled(add_one) == before + 2
    assert [job.name for job in jobs] == ["add_one"] * 2, "done by workers"
    assert x.tolist() == [0] * 8
    with pytest.raises(AttributeError):  # a launch, which this driver cannot do
        add_one[(1,)](x, 7, BLOCK=8, enable_fp_fusion=True)


@pytest.mark.usefixtures("no_gpu")
def test_what_is_compiled_already_is_not_launched_within() -> None:
    """Its inputs may be outputs of kernels that were not launched."""
    x = torch.zeros(8)
    with closing(Compilers(1)) as compilers:
        for _ in range(2):
            with compilers.compile_together():
                add_one[(1,)](x, 7, BLOCK=256, enable_fp_fusion=True)  # this driver cannot launch it
    assert x.tolist() == [0] * 8


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_kernel_is_asked_for_at_its_first_launch_alone(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[object] = []
    compile_of = triton.JITFunction._do_compile
    monkeypatch.setattr(
        triton.JITFunction, "_do_compile", lambda self, *rest: (hashed.append(rest[0]), compile_of(self, *rest))[1]
    )
    with closing(Compilers(workers)) as compilers, compilers.compile_together():
        for _ in range(5):
            add_one[(1,)](torch.zeros(8), 7, BLOCK=2048, enable_fp_fusion=True)
    assert len(hashed) == 1
    kernels = add_one.device_caches[0][0]
    assert (hashed[0] in kernels) == bool(workers), "nothing stands in for a kernel afterwards"


@pytest.mark.usefixtures("no_gpu")
def test_what_kernels_do_not_write_is_zero() -> None:
    """Torch may use it as indices: rows of a step are such outputs, and a gather outside its range ends the process."""
    rows, used = torch.arange(1000.0), torch.full((4096,), 9999)
    size, dtype = used.shape, used.dtype
    with closing(Compilers(0)) as compilers, compilers.compile_together(), torch.inference_mode():
        del used  # its memory is likely to be used again
        for empty in (torch.empty(size, dtype=dtype), torch.empty_like(rows), rows.new_empty(size, dtype=dtype)):
            assert not empty.any()
        assert torch.empty((2, 0)).numel() == 0
        assert rows[rows.new_empty(3, dtype=torch.int64)].tolist() == [0, 0, 0]


def in_cache(folder: Path) -> int:
    return len(list(folder.rglob("*.cubin")))


@pytest.mark.usefixtures("no_gpu")
def test_workers_fill_the_cache_and_survive_a_bad_job(tmp_path: Path) -> None:
    signature = {"x": "*fp32", "count": "i32", "BLOCK": "constexpr"}
    target = GPUTarget("cuda", 90, 32)

    def job(name: str, block: int) -> bytes:
        types = ASTSource, __name__, name, add_one.cache_key, signature
        return pickle.dumps(Job(*types, {(2,): block}, {}, target, {"num_warps": 1}))

    with closing(Compilers(1)) as compilers:
        compilers.fill_cache(job("no_such_kernel", 8))
        compilers.fill_cache(job("add_one", 7))  # not a power of two
        assert in_cache(tmp_path) == 0
        compilers.fill_cache(job("add_one", 32))
    assert in_cache(tmp_path) == 1


@pytest.mark.usefixtures("no_gpu")
def test_workers_compile_what_was_asked_for_in_any_order_of_kernels(tmp_path: Path) -> None:
    """Triton's hash of a kernel depends on whether what it calls was hashed before, as by another kernel."""
    assert next_of.cache_key
    with closing(Compilers(1)) as compilers, compilers.compile_together():
        add_one_by_another[(1,)](torch.zeros(8), BLOCK=8, enable_fp_fusion=True)
    assert in_cache(tmp_path) == 1, "compiled again here"


# What a launcher calls of the CUDA driver.
CALLS = (
    "cuCtxGetCurrent cuCtxSetCurrent cuDeviceGet cuDevicePrimaryCtxRetain cuFuncSetAttribute cuGetErrorString "
    "cuPointerGetAttribute"
)


@pytest.fixture
def cuda_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library to link with, in this process and its children."""
    folder = tmp_path / "driver"
    folder.mkdir()
    code = "".join(f"void {call}(void) {{}}\n" for call in CALLS.split())
    library = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=code, text=True, check=True)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(folder))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    ctypes.CDLL(str(library))


@pytest.mark.skipif(not hasattr(nvidia, "make_launcher"), reason="one C function launches all kernels of this Triton")
@pytest.mark.usefixtures("no_gpu", "cuda_driver")
def test_workers_build_what_launches_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Compilers(1)) as compilers, compilers.compile_together():
        add_one[(1,)](torch.zeros(8), 7, BLOCK=512, enable_fp_fusion=True)
    key, kernel = list(add_one.device_caches[0][0].items())[-1]
    assert "512" in key

    def build(*_: object) -> None:
        raise AssertionError("the launcher is compiled at the first launch")

    monkeypatch.setattr("triton.runtime.build._build", build)
    CudaLauncher(kernel.src, kernel.metadata)  # as the first launch makes it


@pytest.mark.usefixtures("no_gpu")
def test_what_the_cache_has_is_left_to_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Compilers(1)) as compilers:
        for _ in range(2):
            with compilers.compile_together():
                add_one[(1,)](torch.zeros(8), 7, BLOCK=1024, enable_fp_fusion=True)
            add_one.device_caches[0][0].clear()  # as in another process
            monkeypatch.setattr(Compilers, "fill_cache", lambda *_: pytest.fail("asked a worker"))


@pytest.mark.usefixtures("no_gpu")
def test_workers_end_with_the_start_even_while_they_import() -> None:
    compilers = Compilers(2)
    compilers.close()
    assert [worker.returncode for worker in compilers._all] == [-signal.SIGKILL] * 2


@pytest.mark.usefixtures("no_gpu")
def test_a_worker_that_died_before_its_job_does_not_fail_the_start() -> None:
    compilers = Compilers(1)
    compilers._all[0].kill()
    compilers._all[0].wait()
    compilers.fill_cache(b"a job")
    compilers.close()


@pytest.mark.usefixtures("no_gpu")
def test_without_workers_it_is_done_here() -> None:
    compilers = Compilers(1)
    assert [worker.args for worker in compilers._all] == [bound_command("oscine.ops.compile_worker")]
    compilers.close()
    before = compiled(add_one)
    with compilers.compile_together():
        add_one[(1,)](torch.zeros(8), 7, BLOCK=64, enable_fp_fusion=True)
    assert compiled(add_one) == before + 1


@pytest.mark.usefixtures("no_gpu")
def test_a_rank_without_workers_leaves_it_to_another() -> None:
    before, x = compiled(add_one), torch.zeros(8)
    with closing(Compilers(0)) as compilers, compilers.compile_together():
        add_one[(1,)](x, 7, BLOCK=128, enable_fp_fusion=True)
    assert compiled(add_one) == before
    assert x.tolist() == [0] * 8, "nothing was launched"


@pytest.mark.usefixtures("no_gpu")
def test_other_work_begins_when_each_kernel_has_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def fill_cache(_: Compilers, job: bytes, sent: threading.Event) -> None:
        sent.set()
        assert may_end.wait(60), "waits for the kernel first"

    def meanwhile() -> None:
        begun.set()
        may_end.set()

    monkeypatch.setattr(Compilers, "fill_cache", fill_cache)
    with closing(Compilers(1)) as compilers:
        with compilers.compile_together(meanwhile):
            add_one[(1,)](
                torch.zeros(8), 7, BLOCK=2, num_warps=8, enable_fp_fusion=True
            )  # a variant of this test alone
            assert not begun.is_set()
        assert begun.is_set()
        begun.clear()
        with pytest.raises(RuntimeError), compilers.compile_together(meanwhile):
            raise RuntimeError
        assert not begun.is_set()


@pytest.mark.usefixtures("no_gpu")
def test_other_work_begins_although_the_workers_died() -> None:
    done: list[str] = []
    compilers = Compilers(1)
    compilers._all[0].kill()
    with closing(compilers), compilers.compile_together(lambda: done.append("done")):
        add_one[(1,)](torch.zeros(8), 7, BLOCK=2, num_warps=2, enable_fp_fusion=True)
    assert done == ["done"]


@pytest.mark.usefixtures("no_gpu")
def test_a_stamp_holds_while_its_kernels_are_in_the_cache(tmp_path: Path) -> None:
    stamp = Stamp.of("some shapes")
    assert not stamp.holds()
    with closing(Compilers(1)) as compilers, compilers.compile_together():
        for block in (1024, 4096):
            add_one[(1,)](torch.zeros(8), 7, BLOCK=block, enable_fp_fusion=True)
    stamp.leave(compilers)
    assert Stamp.of("some shapes").holds()
    next(tmp_path.rglob("__grp__*.json")).unlink()  # Triton compiles a kernel without it anew
    assert not stamp.holds()
    for damaged in (b"\xff\xfe", bytes(64), b"\n", b""):
        stamp.path.write_bytes(damaged)
        assert not stamp.holds()


@pytest.mark.usefixtures("no_gpu")
def test_a_stamp_of_a_cache_that_was_moved_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's groups have absolute paths."""
    before, after = tmp_path / "before", tmp_path / "after"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(before))
    with closing(Compilers(1)) as compilers, compilers.compile_together():
        add_one[(1,)](torch.zeros(8), 7, BLOCK=4, num_warps=1, enable_fp_fusion=True)
    Stamp.of("some shapes").leave(compilers)
    assert Stamp.of("some shapes").holds()
    before.rename(after)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(after))
    assert Stamp.of("some shapes").path.exists()
    assert not Stamp.of("some shapes").holds()


@pytest.mark.usefixtures("no_gpu")
def test_a_stamp_lists_what_was_compiled_for_another_engine_of_the_process() -> None:
    for shapes in ("an engine", "another engine"):
        with closing(Compilers(1)) as compilers, compilers.compile_together():
            add_one[(1,)](torch.zeros(8), 7, BLOCK=32, num_warps=1, enable_fp_fusion=True)
        Stamp.of(shapes).leave(compilers)
    lists = [Stamp.of(shapes).path.read_text() for shapes in ("an engine", "another engine")]
    assert lists[0] == lists[1]
    assert Stamp.of("another engine").holds()


@pytest.mark.usefixtures("no_gpu")
def test_a_stamp_tells_starts_of_other_shapes_and_versions_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = Stamp.of("some shapes")
    assert stamp.path.parent == tmp_path
    assert stamp == Stamp.of("some shapes") != Stamp.of("other shapes")
    with monkeypatch.context() as changed:
        changed.setattr(torch, "__version__", "3.99")
        assert stamp != Stamp.of("some shapes")
    with monkeypatch.context() as changed:
        changed.setattr("oscine.ops.compile_together.triton_key", lambda: "another release")
        assert stamp != Stamp.of("some shapes")
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    assert stamp != Stamp.of("some shapes")


@pytest.mark.usefixtures("no_gpu")
def test_a_rank_that_compiles_nothing_leaves_no_stamp() -> None:
    with closing(Compilers(0)) as compilers, compilers.compile_together():
        add_one[(1,)](torch.zeros(8), 7, BLOCK=8, enable_fp_fusion=True)
    Stamp.of("some shapes").leave(compilers)
    assert not Stamp.of("some shapes").path.exists()


@pytest.mark.usefixtures("no_gpu")
def test_no_stamp_is_left_in_a_folder_that_is_not_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Compilers(1)) as compilers, compilers.compile_together():
        add_one[(1,)](torch.zeros(8), 7, BLOCK=64, num_warps=1, enable_fp_fusion=True)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/dev/null/cache")
    Stamp.of("some shapes").leave(compilers)
    assert not Stamp.of("some shapes").holds()
