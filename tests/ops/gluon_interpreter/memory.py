"""Values and memory: global memory behind pointers and descriptors, shared memory behind its own descriptors."""

from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor

POISON = 0xFF  # each byte that was never written; NaN in every float


class Value(Tensor):
    """A tensor or a scalar of a kernel, which nothing changes in place."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch has it, in half the time."""
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            return result.as_subclass(cls)
        return tuple(map(value, result)) if isinstance(result, tuple) and isinstance(result[0], Tensor) else result

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Value":  # type: ignore[override]
        plain = self.as_subclass(Tensor)
        if dtype is torch.float8_e4m3fn and not bitcast:  # GPUs saturate
            plain = plain.clamp(-448, 448)
        return value(plain.view(dtype) if bitcast else plain.to(dtype))

    def _new(name: str) -> Any:  # type: ignore[misc] # noqa: N805
        return lambda self, other: getattr(self, name)(other)

    __iadd__, __isub__, __imul__, __itruediv__ = map(_new, ("__add__", "__sub__", "__mul__", "__truediv__"))
    __ifloordiv__, __imod__, __ixor__ = map(_new, ("__floordiv__", "__mod__", "__xor__"))
    __iand__, __ior__, __ilshift__, __irshift__ = map(_new, ("__and__", "__or__", "__lshift__", "__rshift__"))


def value(x: Any, dtype: torch.dtype | None = None) -> Value:
    if isinstance(x, Tensor):
        return (x if dtype is None else x.to(dtype)).as_subclass(Value)
    return torch.tensor(x, dtype=dtype or (torch.int32 if isinstance(x, int) else torch.float32)).as_subclass(Value)


@dataclass(frozen=True)
class Pointer:
    """Into a tensor's memory; `at` counts elements."""

    memory: Tensor  # [elements], all that the tensor's storage holds
    at: Any

    @classmethod
    def to_tensor(cls, tensor: Tensor) -> Self:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(tensor.detach().as_strided((size,), (1,), 0), value(tensor.storage_offset(), torch.int64))

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.at + offset)

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def to(self, dtype: torch.dtype) -> Value:
        """As a number."""
        return value(self.memory.data_ptr() + self.at.to(dtype) * self.memory.element_size())

    def wanted(self, mask: Any, *others: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(elements, mask, others), of one shape. Raises IndexError where a wanted element is outside."""
        given = [value(x) for x in (self.at, True if mask is None else mask, *others)]
        at, mask, *rest = (x.as_subclass(Tensor) for x in torch.broadcast_tensors(*given))
        mask = mask.bool()
        outside = mask & ((at < 0) | (at >= len(self.memory)))
        if outside.any():
            raise IndexError(f"elements {at[outside].flatten()[:8].tolist()} of {len(self.memory)}")
        return at.long(), mask, rest


def load(pointer: Pointer, mask: Any = None, other: Any = None, cache_modifier: str = "") -> Value:
    at, mask, _ = pointer.wanted(mask)
    found = pointer.memory[torch.where(mask, at, 0)]
    return value(torch.where(mask, found, poison(found.shape, found.dtype) if other is None else other).to(found.dtype))


def store(pointer: Pointer, x: Any, mask: Any = None) -> None:
    at, mask, (x,) = pointer.wanted(mask, x)
    pointer.memory[at[mask]] = x[mask].to(pointer.memory.dtype)


def atomic_add(pointer: Pointer, x: Any, mask: Any = None, sem: str = "acq_rel") -> Value:
    at, mask, _ = pointer.wanted(mask)
    assert at.numel() == 1, "only of one element"
    old = pointer.memory[at].clone()
    pointer.memory[at[mask]] += x
    return value(old)


def poison(shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.full((prod(shape) * dtype.itemsize,), POISON, dtype=torch.uint8).view(dtype).reshape(shape)


@dataclass(frozen=True)
class Shared:
    """Part of shared memory, contiguous until it is sliced or permuted; swizzles do not show."""

    data: Tensor
    layout: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: Any) -> "Shared":
        i = int(i)
        assert 0 <= i < len(self.data), f"buffer {i} of {len(self.data)}"
        return Shared(self.data[i])

    def slice(self, start: Any, length: int, dim: int = 0) -> "Shared":
        return Shared(self.data.narrow(dim, int(start), length))

    def permute(self, order: Any) -> "Shared":
        return Shared(self.data.permute(*order))

    def reshape(self, shape: Any) -> "Shared":
        """Of a permuted one, a view that is read when it is used, as shared memory is."""
        shape = tuple(shape)
        return Reshaped(self.data, None, shape) if not self.data.is_contiguous() else Shared(self.data.view(shape))

    def _reinterpret(self, dtype: torch.dtype, shape: Any, layout: Any) -> "Shared":
        assert self.data.is_contiguous()
        return Shared(self.data.view(-1).view(dtype).view(tuple(shape)))

    def load(self, layout: Any = None) -> Value:
        return value(self.data.clone())

    def store(self, x: Tensor) -> None:
        assert x.shape == self.data.shape
        self.data.copy_(x)


@dataclass(frozen=True)
class Reshaped(Shared):
    size: tuple[int, ...] = ()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return found.reshape(self.size) if name == "data" else found


def allocate_shared_memory(dtype: torch.dtype, shape: Any, layout: Any) -> Shared:
    return Shared(poison(tuple(shape), dtype), layout)


@dataclass(frozen=True)
class DeviceDescriptor:
    """A kernel's view of the host's descriptor."""

    host: Any

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.host.base.dtype
        return dtype

    @property
    def layout(self) -> Any:
        return self.host.layout

    @property
    def block_type(self) -> Any:
        shape = list(self.host.block_shape)
        return SimpleNamespace(shape=shape, nbytes=prod(shape) * self.dtype.itemsize)

    def box(self, at: list[int]) -> Tensor:
        """Zeros where it leaves the matrix."""
        base, shape = self.host.base, tuple(self.host.block_shape)
        matrix = base.as_strided(tuple(self.host.shape), tuple(self.host.strides), base.storage_offset())
        box = torch.zeros(shape, dtype=self.dtype)
        spans = [(max(a, 0), min(a + n, size)) for a, n, size in zip(at, shape, matrix.shape, strict=True)]
        if all(begin < end for begin, end in spans):
            inside = tuple(slice(begin - a, end - a) for (begin, end), a in zip(spans, at, strict=True))
            box[inside] = matrix[tuple(slice(*span) for span in spans)]
        return box
