"""Gumbel noise from a counter: a hash of (seed, position, token id), the same on every device and in any batch.

All arithmetic is on unsigned 32-bit integers, modulo 2^32 (here in int64, masked), so that a kernel repeats it exactly:

    mix(x)  = x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16
    a       = mix(position ^ mix(seed low word ^ mix(seed high word)))
    b       = mix(a + 0x9e3779b9)
    h       = mix(mix(token + a) ^ b)
    v       = min((h + 1/2) 2^-32, 1 - 2^-24)                    float32, uniform
    g       = -log(-log(1 - v))                                  Gumbel

mix is a bijection with little bias (constants: C. Wellons, hash-prospector). Two keyed rounds keep the noise of one
position from being a permutation of another's. Small v give large g with full precision, and the largest g wins.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def gumbel(seed_N: Tensor, position_N: Tensor, num_tokens: int, first: int = 0) -> Tensor:
    """int64 seeds [N] and positions [N] -> float32 [N, num_tokens], finite; of the tokens from `first` on."""
    return gumbel_of(seed_N, position_N, torch.arange(first, first + num_tokens, device=seed_N.device))


def gumbel_of(seed_N: Tensor, position_N: Tensor, token_NA: Tensor) -> Tensor:
    """gumbel for some tokens: int64 [A], or different ones per row [N, A] -> float32 [N, A]."""
    hashed = hash_tokens(seed_N, position_N, token_NA)
    uniform = ((hashed.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def hash_tokens(seed_N: Tensor, position_N: Tensor, token_NA: Tensor) -> Tensor:
    """int64 [N, A], each in [0, 2^32); tokens as in gumbel_of."""
    key_N = _mix((position_N & WORD) ^ _mix((seed_N & WORD) ^ _mix((seed_N >> 32) & WORD)))
    second_N = _mix((key_N + 0x9E3779B9) & WORD)
    return _mix(_mix((token_NA + key_N[:, None]) & WORD) ^ second_N[:, None])


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & WORD
    return x ^ (x >> 16)
