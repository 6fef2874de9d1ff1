"""The products of adapters in C, beside those in torch."""

from itertools import product

import pytest
import torch
from torch import Tensor

from oscine.extensions.adapters.native import Native
from oscine.extensions.adapters.products import Norm, Reference
from oscine.ops.native.library import unavailable

from .adapters import memory

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="needs the C kernels")

CPU, SLOTS = torch.device("cpu"), 3
# (tokens, experts of a token, E, columns, rows, rank)
SHAPES = {
    "a token": (1, 1, 1, 96, 40, 4),
    "odd sizes": (7, 1, 1, 101, 131, 5),
    "one column": (3, 1, 1, 1, 1, 1),
    "pairs": (5, 3, 6, 96, 200, 16),
    "on all threads": (40, 4, 8, 320, 640, 64),
    "nothing": (0, 2, 4, 32, 32, 8),
}


def close(found: Tensor, expected: Tensor) -> None:
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * (1 + largest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_the_products_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    tokens, per_token, experts, columns, num_rows, rank = SHAPES[name]
    torch.manual_seed(tokens)
    of_experts = (experts,) if experts > 1 else ()
    into = memory(*of_experts, rank, columns, seed=1, device=CPU, dtype=dtype)
    out_of = memory(*of_experts, num_rows, rank, seed=2, device=CPU, dtype=dtype)
    keys_T = (torch.arange(tokens) % (SLOTS + 1) - int(tokens > 1)).int()
    ids_TK = torch.rand(tokens, experts).argsort(1)[:, :per_token].int() if experts > 1 else None
    native, reference = Native(), Reference()
    rows, weights_P = native.rows(keys_T, SLOTS, ids_TK, experts), torch.rand(tokens * per_token)
    x_TK, h_PK = torch.randn(tokens, columns), torch.randn(tokens * per_token, columns)
    close(native.shrink(x_TK, rows, into, 1), reference.shrink(x_TK, rows, into, 1))
    for given, named in product((x_TK, h_PK), ({"adds": False}, {"adds": True, "weights_P": weights_P})):
        found, expected = torch.full((2, tokens, per_token, num_rows), 7.0)
        native.through(given, rows, into, out_of, found, **named)
        reference.through(given, rows, into, out_of, expected, **named)
        close(found, expected)
        if tokens > 1 and named["adds"]:
            assert (found[keys_T < 0] == 7).all()
    wide = torch.full((2, tokens * per_token, num_rows + 3), 7.0)
    y = reference.shrink(x_TK, rows, into, 1)
    for backend, out in zip((native, reference), wide, strict=True):
        backend.expand(y, rows, out_of, out, adds=True)
    close(*wide)
    assert (wide[:, :, num_rows:] == 7).all()


@pytest.mark.parametrize("ends", [(40, 60, 100), (64, 128, 200), (1, 2, 3)])
def test_parts_of_the_result_have_their_own_columns(ends: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    into, out_of = torch.randn(SLOTS, 12, 50), torch.randn(SLOTS, ends[-1], 4)
    keys_T, x_TK = torch.tensor([2, -1, 0], dtype=torch.int32), torch.randn(3, 50)
    norm = Norm(torch.rand(3, 2) + 0.5, 1e-5, 50)
    results = []
    for backend in (Native(), Reference()):
        rows = backend.rows(keys_T, SLOTS)
        y = backend.shrink(x_TK, rows, into, 3)
        for given in (None, norm):
            results.append(torch.ones(3, ends[-1]))
            backend.expand(y, rows, out_of, results[-1], adds=True, ends=ends, norm=given)
    close(results[0], results[2])
    close(results[1], results[3])
    assert not torch.equal(results[0], results[1])


def test_factors_are_read_where_they_are() -> None:
    """A copy of the experts of all slots would take longer than the products."""
    memory = torch.randn(SLOTS, 3 << 20)
    into = memory[:, 5 : 5 + (1 << 20)].view(SLOTS, 16, 16, 4096)
    keys_T, x_TK = torch.tensor([1], dtype=torch.int32), torch.randn(1, 4096)
    for backend in (Native(), Reference()):
        rows = backend.rows(keys_T, SLOTS, torch.tensor([[3]], dtype=torch.int32), 16)
        with torch.profiler.profile(profile_memory=True) as profile:
            backend.shrink(x_TK, rows, into, 1)
        most = max(event.self_cpu_memory_usage for event in profile.key_averages())
        assert most <= 16 * 4096 * 4 * 2, type(backend)
