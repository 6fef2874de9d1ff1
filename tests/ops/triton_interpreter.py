"""Triton's own interpreter, without its repeated work."""

import warnings
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.language import core
from triton.runtime import interpreter


def prepare() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)  # Triton's own
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # log(0)
    do_less()
    _round_as_gpus_do()
    _multiply_with_block_scales()


def do_less() -> None:
    _patch_language_once()
    _find_dtypes_once()
    _describe_shapes_once()
    _take_integers_for_masks()
    core._type_for_tuple_values = lambda values, fields=None: None  # only the compiler asks for it
    # Checks of overflows are computed and, unless `debug` is set, not looked at.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _take_integers_for_masks() -> None:
    """The interpreter converts a Python bool to int32, but since Triton 3.9 a mask must be boolean."""
    builder: Any = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask: Any) -> Any:
        return interpreter.TensorHandle(mask.data.astype(bool), core.int1)

    builder.create_masked_load = lambda self, at, mask, *args, **named: load(self, at, boolean(mask), *args, **named)
    builder.create_masked_store = lambda self, at, x, mask, *args, **named: store(
        self, at, x, boolean(mask), *args, **named
    )


def _round_as_gpus_do() -> None:
    """To FP8 the interpreter rounds halves up, loses the carry, and takes NaN for a number. torch does not saturate.

    To bfloat16 it cuts bits off, which doubles the error.
    """
    convert = interpreter._convert_float
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}
    bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}

    def exactly(data: Any, before: Any, after: Any, rounding_mode: Any) -> Any:
        source, target = dtypes.get(str(before)), dtypes.get(str(after))
        rounds_to_bfloat16 = (source, target) == (torch.float32, torch.bfloat16)
        if source is None or target is None or not (rounds_to_bfloat16 or torch.float8_e4m3fn in (source, target)):
            return convert(data, before, after, rounding_mode)
        given = torch.from_numpy(np.array(data)).view(source)
        if target is torch.float8_e4m3fn:
            given = given.clamp(-448, 448)
        rounded = given.to(target)
        if target in bits:
            return rounded.view(bits[target]).numpy()
        return rounded.view(torch.uint8).numpy().view(f"uint{after.primitive_bitwidth}")

    interpreter._convert_float = exactly


def _multiply_with_block_scales() -> None:
    """Products of e4m3 with block scales. The interpreter has them only in newer releases of Triton."""

    def product(_: Any, left: Any, left_scale: Any, left_type: Any, right: Any, right_scale: Any, *rest: Any) -> Any:
        rows, columns = (torch.from_numpy(np.array(x.data)).view(torch.float8_e4m3fn).double() for x in (left, right))
        rows *= block_scales(left_scale).repeat_interleave(32, -1)
        columns *= block_scales(right_scale).repeat_interleave(32, -1).T
        total = rest[-1]
        return interpreter.TensorHandle(total.data + (rows @ columns).float().numpy(), total.dtype)

    def block_scales(scale: Any) -> torch.Tensor:
        power = torch.from_numpy(np.array(scale.data)).double()
        return torch.where(power == 255, torch.nan, torch.exp2(power - 127))

    builder: Any = interpreter.InterpreterBuilder
    builder.create_dot_scaled = product


def _find_dtypes_once() -> None:
    """The interpreter makes a table of all of numpy's types at each of its operations."""
    find, found = interpreter._get_np_dtype, {}

    def find_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    interpreter._get_np_dtype = find_once


def _describe_shapes_once() -> None:
    """The language describes and checks the shape of each tensor and of each type anew."""

    @cache
    def of_type(shape: tuple[int, ...], element: str) -> tuple[Any, int, str]:
        block = SimpleNamespace()
        describe(block, element, list(shape))
        return block.shape, block.numel, block.name

    @cache
    def of_tensor(*shape: int) -> tuple[Any, Any]:
        return core.constexpr(prod(shape)), core.tuple([core.constexpr(size) for size in shape])

    def begin_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        self.shape, self.numel, self.name = of_type(sizes, str(element_ty))

    def begin_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = of_tensor(*(type.shape if type.is_block() else ()))

    describe, core.block_type.__init__ = core.block_type.__init__, begin_type
    core.tensor.__init__ = begin_tensor


def _patch_language_once() -> None:
    """The interpreter patches the language at each launch and at each call of a function within."""
    everything = SimpleNamespace(__globals__={"tl": triton.language, "core": core})
    interpreter._patch_lang(everything)
    done = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda fn: done
