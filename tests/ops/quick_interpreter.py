"""Makes Triton's interpreter several times as fast, and changes nothing of what it computes.

It patches the language at each launch and at each call of a function within, and it describes the type and the shape of
each value anew. Here it patches once, and a shape is described once.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch.testing
import triton
from triton.language import core
from triton.runtime import interpreter


def quicken() -> None:
    """To be called once, in a process that interprets."""
    _patch_language_once()
    _describe_shapes_once()
    interpreter._get_np_dtype = _numpy_dtype(interpreter._get_np_dtype)
    torch.testing._comparison._HAS_DTENSOR = False  # assert_close would import distributed tensors, for a second


def _patch_language_once() -> None:
    everything = SimpleNamespace(__globals__={"tl": triton.language, "core": core})
    interpreter._patch_lang(everything)
    done = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda fn: done


def _describe_shapes_once() -> None:
    core.tuple.__init__ = _init_tuple
    core.tuple.type = property(_type_of_tuple, lambda self, type: setattr(self, "_type", type))
    core.block_type.__init__ = _init_block_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__ = _init_tensor


def _init_tuple(self: Any, args: Any, type: Any = None) -> None:
    self.values = list(args)
    self._type = core.tuple_type(type) if isinstance(type, list | tuple) else type


def _type_of_tuple(self: Any) -> Any:
    if self._type is None:
        self._type = core._type_for_tuple_values(self.values)
    return self._type


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    self.shape, self.numel = _block(tuple(core._unwrap_if_constexpr(size) for size in shape))


@cache
def _block(sizes: tuple[int, ...]) -> tuple[Any, int]:
    assert sizes, "0d block_type is forbidden"
    return core.tuple(sizes), core.validate_block_shape(sizes)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _extent(tuple(type.shape) if type.is_block() else ())


@cache
def _extent(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    numel = 1
    for size in sizes:
        numel *= size
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(numel)


def _numpy_dtype(original: Any) -> Any:
    of_number = cache(original)
    return lambda dtype: original(dtype) if dtype.scalar.is_ptr() else of_number(dtype.scalar)
