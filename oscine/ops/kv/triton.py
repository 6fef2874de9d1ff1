"""The arithmetic of ops/kv/fp8.py for Triton kernels. Pages in FP8 are bytes, so a kernel knows them by their type."""

import triton
import triton.language as tl

from oscine.ops.kv import fp8

CARRY = tl.constexpr(fp8.CARRY)
TOP_EXPONENT = tl.constexpr(fp8.TOP_EXPONENT)
LEAST_EXPONENT = tl.constexpr(fp8.LEAST_EXPONENT)


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 127), as float32."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_for(most):
    """The exponent of the scale of a row; `most` is the largest magnitude in it, float32."""
    bits = most.to(tl.int32, bitcast=True)
    return tl.maximum(((bits + CARRY) >> 23) - TOP_EXPONENT, LEAST_EXPONENT)


@triton.jit
def to_bytes(x):
    """float32, divided by the scale -> bytes of e4m3. Values beyond 448 become 448: the instruction saturates."""
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def from_bytes(elements, dtype: tl.constexpr):
    """Bytes of e4m3, not yet multiplied by the scale. Exact in every float dtype.

    Through float16, as GPUs convert e4m3 to nothing else, then float32: float16 to bfloat16 is slow in Triton 3.9.
    """
    return elements.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(dtype)
