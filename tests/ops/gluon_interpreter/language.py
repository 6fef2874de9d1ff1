"""The modules that kernels import, in place of Gluon: decorators, the language, and its Hopper part."""

import importlib
import itertools
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton.experimental.gluon as real_gluon
import triton.experimental.gluon.language as real_language
import triton.experimental.gluon.nvidia.hopper  # the host's descriptors are used as they are
import triton.language.core
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from tests.ops.gluon_interpreter import memory, program
from tests.ops.gluon_interpreter.memory import DeviceDescriptor, Pointer, Shared, Value, value
from tests.ops.gluon_interpreter.program import Program
from tests.ops.gluon_interpreter.ptx import run_ptx
from tests.ops.gluon_interpreter.tensor_memory import blackwell


class Constant(int):
    """An integer gl.constexpr."""

    @property
    def value(self) -> int:
        return int(self)


class Text(str):
    """A string gl.constexpr."""

    @property
    def value(self) -> str:
        return str(self)


def constexpr(x: Any) -> Any:
    return Constant(x) if isinstance(x, int) else Text(x) if isinstance(x, str) else x


class Product:
    """What a wgmma has been asked for."""

    def __init__(self, compute: Callable[[], Value]) -> None:
        self._compute = compute
        self._result: Value | None = None

    def result(self) -> Value:
        if self._result is None:
            self._result = self._compute()
        return self._result


class _Outstanding(threading.local):
    """The products that a partition has not waited for, in the order in which they were asked for."""

    def __init__(self) -> None:
        self.products: list[Product] = []


_outstanding = _Outstanding()


def warpgroup_mma(a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False) -> Any:
    dtype = torch.float32 if a.dtype.is_floating_point else torch.int32
    wide = torch.float32 if a.dtype.is_floating_point else torch.float64

    def compute() -> Value:
        left, right = (x.data if isinstance(x, Shared) else x for x in (a, b))
        product = left.as_subclass(Tensor).to(wide) @ right.to(wide)
        before = acc.result() if isinstance(acc, Product) else acc
        return value(product.to(dtype) + (before if use_acc else 0))

    product = Product(compute)
    if not is_async:
        return product.result()
    _outstanding.products.append(product)
    return product


def warpgroup_mma_wait(num_outstanding: int, deps: Any) -> Any:
    """Those that are still on their way stay so."""
    done = len(_outstanding.products) - num_outstanding
    for product in _outstanding.products[: max(done, 0)]:
        product.result()
    under_way = _outstanding.products = _outstanding.products[max(done, 0) :]
    results = tuple(dep.result() if isinstance(dep, Product) and dep not in under_way else dep for dep in deps)
    return results[0] if len(results) == 1 else results


def inline_asm(asm: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    """Elements that PTX sees together are taken to be neighbours in the last dimension."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    inputs = [x.as_subclass(Tensor) for x in torch.broadcast_tensors(*args)]
    shape = inputs[0].shape
    if not shape:  # a scalar is in all threads
        inputs = [x.expand(32) for x in inputs]
    results = [value(x) for x in run_ptx(asm, [x.reshape(-1, pack) for x in inputs], dtypes, pack)]
    results = [x.view(shape) if shape else x.view(-1)[0] for x in results]
    return tuple(results) if isinstance(dtype, tuple) else results[0]


class Jit:
    """A kernel or a function of kernels."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else lambda *args, **kwargs: self.function(instance, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self._launch(grid, args, kwargs)

    def _launch(self, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        num_warps = kwargs.pop("num_warps", 4)
        for option in ("launch_pdl", "maxnreg", "enable_fp_fusion"):
            kwargs.pop(option, None)
        values = [_argument(arg) for arg in args]
        for ids in itertools.product(*map(range, grid)):
            Program.current = Program(ids, grid, num_warps)
            self.function(*values, **kwargs)
            Program.current.end()


def _argument(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return Pointer.to_tensor(arg)
    if hasattr(arg, "block_shape"):
        return DeviceDescriptor(arg)
    return value(arg) if isinstance(arg, int | float) and not isinstance(arg, bool) else arg


def jit(function: Any = None, **options: Any) -> Any:
    return Jit(function) if function is not None else Jit


def _same(x: Any, *_: Any, **__: Any) -> Any:
    return x


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _assert(condition: Any, message: str = "") -> None:
    assert condition, message


def _reduced(reduce: Callable[..., Tensor]) -> Callable[..., Value]:
    return lambda x, axis: value(reduce(x, axis))


def _sum(x: Tensor, axis: int) -> Tensor:
    return x.sum(axis, dtype=x.dtype)  # torch would add integers up in 64 bits


def _pairwise(function: Callable[..., Tensor]) -> Callable[..., Value]:
    def apply(a: Any, b: Any) -> Value:
        given = next(x for x in (a, b) if isinstance(x, Tensor))
        return value(function(*(x if isinstance(x, Tensor) else torch.tensor(x, dtype=given.dtype) for x in (a, b))))

    return apply


def _language() -> ModuleType:
    gl = ModuleType(real_language.__name__)
    for name in ("NVMMASharedLayout", "SwizzledSharedLayout", "DistributedLinearLayout", "NVMMADistributedLayout"):
        setattr(gl, name, getattr(real_language, name))
    for name in ("BlockedLayout", "SliceLayout", "DotOperandLayout"):
        setattr(gl, name, lambda *args, **kwargs: None)
    for name in ("int8", "int16", "int32", "int64", "uint8", "float16", "bfloat16", "float32"):
        setattr(gl, name, getattr(torch, name))
    gl.float8e5, gl.float8e4nv = torch.float8_e5m2, torch.float8_e4m3fn  # type: ignore[attr-defined]
    everything = {
        "constexpr": constexpr,
        "tensor": Value,
        "shared_memory_descriptor": Shared,
        "program_id": lambda axis: value(Program.current.ids[axis]),
        "num_programs": lambda axis: value(Program.current.grid[axis]),
        "num_warps": lambda: Program.current.num_warps,
        "static_range": range,
        "arange": lambda start, end, layout=None: value(torch.arange(start, end, dtype=torch.int32)),
        "zeros": lambda shape, dtype, layout=None: value(torch.zeros(tuple(shape), dtype=dtype)),
        "full": lambda shape, x, dtype, layout=None: value(value(x).expand(tuple(shape)).to(dtype)),
        "to_tensor": value,
        "load": memory.load,
        "store": memory.store,
        "atomic_add": memory.atomic_add,
        "allocate_shared_memory": memory.allocate_shared_memory,
        "convert_layout": _same,
        "thread_barrier": _nothing,
        "static_assert": _assert,
        "where": lambda condition, a, b: value(torch.where(value(condition), a, b)),
        "minimum": _pairwise(torch.minimum),
        "maximum": _pairwise(torch.maximum),
        "exp": lambda x: value(torch.exp(x)),
        "exp2": lambda x: value(torch.exp2(x)),
        "rsqrt": lambda x: value(torch.rsqrt(x)),
        "abs": lambda x: value(torch.abs(x)),
        "sum": _reduced(_sum),
        "max": _reduced(torch.amax),
        "associative_scan": lambda x, axis, combine: value(torch.cumsum(x, axis, dtype=x.dtype)),  # of additions
        "cdiv": lambda a, b: (a + b - 1) // b,
        "reshape": lambda x, shape: value(x.reshape(tuple(shape))),
        "permute": lambda x, order: value(x.permute(*order)),
        "expand_dims": lambda x, axis: value(x.unsqueeze(axis)),
        "join": lambda a, b: value(torch.stack((a, b), -1)),
        "split": lambda x: (x[..., 0], x[..., 1]),
        "inline_asm_elementwise": inline_asm,
        "warp_specialize": lambda partitions, warps, registers: Program.current.specialise(partitions),
    }
    for name, what in everything.items():
        setattr(gl, name, what)
    return gl


def _hopper() -> ModuleType:
    hopper = ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    contents = {
        "mbarrier": SimpleNamespace(
            MBarrierLayout=_nothing, init=program.init, expect=program.expect, arrive=program.arrive, wait=program.wait
        ),
        "tma": SimpleNamespace(tensor_descriptor=DeviceDescriptor, async_copy_global_to_shared=program.async_copy),
        "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_wait": warpgroup_mma_wait,
        "fence_async_shared": _nothing,
    }
    for name, what in contents.items():
        setattr(hopper, name, what)
    return hopper


def install() -> None:
    """Modules of kernels that are imported from here on use what is in this one."""
    language, hopper = _language(), _hopper()
    sys.modules |= {module.__name__: module for module in (language, hopper, blackwell())}
    real_gluon.language = language
    real_gluon.jit, real_gluon.constexpr_function = jit, _same
    triton.language.core._aggregate = _same
    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(importlib.import_module("triton.language.extra.cuda"), name, _nothing)
    _launch_triton_kernels_without_options()


def _launch_triton_kernels_without_options() -> None:
    call = GridExecutor.__call__

    def without(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("launch_pdl", None)
        call(self, *args, **kwargs)

    GridExecutor.__call__ = without
