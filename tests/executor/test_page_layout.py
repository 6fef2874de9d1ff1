"""Moving a page piece by piece equals slicing the tensor that it is a part of."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscine.executor.kv.page_layout import PageLayout, check_compatible, copies, layouts_of
from tests.executor.tiny import CONFIG

RANKS = (1, 2, 4, 8)
LAYOUT = PageLayout("m", "full", 3, 8, 16, 4, "float16", 2)


def of_rank(page: np.ndarray, layout: PageLayout, rank: int) -> np.ndarray:
    """Bytes of a logical page [layers, 2, heads, page size, head dim] on one rank."""
    heads = np.split(page, layout.num_ranks, axis=2)[rank]
    return np.frombuffer(np.ascontiguousarray(heads).tobytes(), np.uint8)


@given(
    num_layers=st.integers(1, 4),
    heads_of_eight=st.integers(1, 2),
    page_size=st.sampled_from((16, 64)),
    head_dim=st.sampled_from((2, 16)),
    dtype=st.sampled_from((np.uint32, np.uint16)),
    ranks=st.tuples(st.sampled_from(RANKS), st.sampled_from(RANKS)),
)
def test_pieces_make_the_page_of_every_rank(
    num_layers: int, heads_of_eight: int, page_size: int, head_dim: int, dtype: type, ranks: tuple[int, int]
) -> None:
    num_heads = 8 * heads_of_eight
    page = np.random.default_rng(0).integers(0, 1 << 16, (num_layers, 2, num_heads, page_size, head_dim), dtype)
    size = np.dtype(dtype).itemsize
    layout = PageLayout("m", "sliding", num_layers, num_heads, page_size, head_dim, np.dtype(dtype).name, size)
    source, target = (replace(layout, num_ranks=n) for n in ranks)
    assert source.page_bytes == target.page_bytes == page.nbytes
    parts = [of_rank(page, source, rank) for rank in range(source.num_ranks)]
    for rank in range(target.num_ranks):
        found = np.full(target.rank_bytes, 255, np.uint8)
        written = np.zeros(target.rank_bytes, np.int64)
        pieces = copies(source, target, rank)
        for source_rank, source_offset, target_offset, length in pieces:
            found[target_offset : target_offset + length] = parts[source_rank][source_offset : source_offset + length]
            written[target_offset : target_offset + length] += 1
        assert (written == 1).all()
        assert (found == of_rank(page, target, rank)).all()
        assert len(pieces) == (1 if ranks[0] == ranks[1] else 2 * num_layers * max(1, ranks[0] // ranks[1]))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"page_size": 32}, "page size: 32 there, 16 here"),
        ({"dtype": "bfloat16"}, "dtype: bfloat16 there, float16 here"),
        ({"num_kv_heads": 4}, "num kv heads: 4 there, 8 here"),
        ({"num_layers": 2}, "num layers: 2 there, 3 here"),
        ({"head_dim": 8}, "head dim: 8 there, 4 here"),
        ({"model": "n"}, "model: n there, m here"),
        ({"group": "sliding"}, "group: sliding there, full here"),
    ],
)
def test_layouts_that_differ_are_refused_by_what_differs(change: dict[str, object], difference: str) -> None:
    with pytest.raises(ValueError, match=difference):
        copies(replace(LAYOUT, **change), LAYOUT, 0)  # type: ignore[arg-type]


def test_heads_must_be_shared_out_evenly() -> None:
    with pytest.raises(ValueError, match="8 kv heads cannot be shared out among 3 ranks"):
        replace(LAYOUT, num_ranks=3)


def test_pages_are_those_of_equal_weights_wherever_these_are() -> None:
    ours, _ = layouts_of("/models/a/checkpoint", "1234", CONFIG, 16, "float32", 4)
    check_compatible(layouts_of("/mnt/checkpoint/", "1234", CONFIG, 16, "float32", 4)[0], ours)
    with pytest.raises(ValueError, match="pages differ in model"):
        check_compatible(layouts_of("/models/b/checkpoint", "5678", CONFIG, 16, "float32", 4)[0], ours)
