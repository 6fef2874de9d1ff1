"""Moving a page piece by piece equals slicing the tensor that it is a part of."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscine.executor.start.identity import identity_of
from oscine.extensions.disaggregation.copies import copies
from oscine.kv_dtype import KVDtype
from oscine.kv_group import KVGroup
from tests.tiny import TINY

RANKS = (1, 2, 4, 8)
GROUP = KVGroup(None, (1, 3, 5), 8, 16, 4, "float16")


def of_rank(page: np.ndarray, layout: KVGroup, rank: int) -> np.ndarray:
    """Bytes of a logical page [layers, 2, heads, page size, head dim] on one rank. More ranks than heads share them."""
    shared_out = np.repeat(page, max(1, layout.num_ranks // page.shape[2]), axis=2)
    heads = np.split(shared_out, layout.num_ranks, axis=2)[rank]
    return np.frombuffer(np.ascontiguousarray(heads).tobytes(), np.uint8)


@given(
    num_layers=st.integers(1, 4),
    num_heads=st.sampled_from((1, 2, 8, 16)),
    page_size=st.sampled_from((16, 64)),
    head_dim=st.sampled_from((2, 16)),
    dtype=st.sampled_from(("float32", "float16", "uint8", KVDtype.FP8)),
    ranks=st.tuples(st.sampled_from(RANKS), st.sampled_from(RANKS)),
)
def test_pieces_make_the_page_of_every_rank(
    num_layers: int, num_heads: int, page_size: int, head_dim: int, dtype: str, ranks: tuple[int, int]
) -> None:
    group = KVGroup(24, tuple(range(num_layers)), num_heads, page_size, head_dim, dtype)
    source, target = (replace(group, num_ranks=n) for n in ranks)
    elements = {KVDtype.FP8: np.dtype("uint8")}.get(dtype) or np.dtype(dtype)
    page = np.random.default_rng(0).integers(0, 256, group.page_shape).astype(elements)
    rows = page_size + (-(-page_size // head_dim) if dtype == KVDtype.FP8 else 0)
    assert page.shape == (num_layers, 2, num_heads, rows, head_dim)
    shares = [min(num_heads, n) for n in ranks]
    assert source.page_bytes * shares[0] == target.page_bytes * shares[1] == page.nbytes
    parts = [of_rank(page, source, rank) for rank in range(source.num_ranks)]
    for rank in range(target.num_ranks):
        found = np.full(target.page_bytes, 255, np.uint8)
        written = np.zeros(target.page_bytes, np.int64)
        pieces = copies(source, target, rank)
        for source_rank, source_offset, target_offset, length in pieces:
            found[target_offset : target_offset + length] = parts[source_rank][source_offset : source_offset + length]
            written[target_offset : target_offset + length] += 1
        assert (written == 1).all()
        assert (found == of_rank(page, target, rank)).all()
        assert len(pieces) == (1 if shares[0] == shares[1] else 2 * num_layers * max(1, shares[0] // shares[1]))


def test_every_holder_of_a_head_is_read_by_some_targets() -> None:
    """From 4 ranks with one of two heads to 8 ranks; equal ranks read each other."""
    two = replace(GROUP, num_kv_heads=2)
    source, target = replace(two, num_ranks=4), replace(two, num_ranks=8)
    assert [copies(source, target, rank)[0].source_rank for rank in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert [copies(target, target, rank)[0].source_rank for rank in range(8)] == list(range(8))
    assert [copies(target, two, 0)[i].source_rank for i in (0, -1)] == [0, 4]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"page_size": 32}, "page size: 32 there, 16 here"),
        ({"dtype": "bfloat16"}, "dtype: bfloat16 there, float16 here"),
        ({"dtype": KVDtype.FP8}, "dtype: float8_e4m3fn there, float16 here"),
        ({"num_kv_heads": 4}, "num kv heads: 4 there, 8 here"),
        ({"layers": (1, 3)}, r"layers: \(1, 3\) there, \(1, 3, 5\) here"),
        ({"head_dim": 8}, "head dim: 8 there, 4 here"),
        ({"window": 128}, "window: 128 there, None here"),
    ],
)
def test_groups_that_differ_are_refused_by_what_differs(change: dict[str, object], difference: str) -> None:
    with pytest.raises(ValueError, match=difference):
        copies(replace(GROUP, **change), GROUP, 0)  # type: ignore[arg-type]


def test_heads_must_be_shared_out_evenly() -> None:
    with pytest.raises(ValueError, match="8 kv heads cannot be shared out among 3 ranks"):
        replace(GROUP, num_ranks=3)


def test_the_dtype_must_be_one_that_pages_can_have() -> None:
    with pytest.raises(ValueError, match="keys and values cannot be complex64: only float32, "):
        replace(GROUP, dtype="complex64")


def test_pages_are_those_of_equal_weights_wherever_these_are() -> None:
    ours = identity_of("/models/a/checkpoint", "1234", TINY)
    assert identity_of("/mnt/checkpoint/", "1234", TINY) == ours
    assert identity_of("/models/a/checkpoint", "5678", TINY) != ours
    assert identity_of("/models/a/checkpoint", "1234", replace(TINY, sliding_window=25)) != ours
