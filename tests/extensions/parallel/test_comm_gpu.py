"""Messages between two GPUs: sums of own kernels and of norms against float32, and on both ranks bit for bit; tokens at
the experts of both, and their sums."""

import pytest

from benchmarks.kernels.ranks import run_ranks

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(400)]


SUMS = ["own_kernels", "embeddings", "choices", "norms", "left_choices", "dead_peer", "replays"]
EXPERTS = ["exchanged", "deserted"]


@pytest.mark.parametrize("what", [*SUMS, *EXPERTS])
def test_two_ranks(what: str) -> None:
    for rank, wrong in enumerate(run_ranks("tests.extensions.parallel.comm_ranks", what, limit=180)):
        assert not wrong, f"rank {rank}, {len(wrong)} in all:\n" + "\n".join(wrong[:20])
