"""In place of oscine.extensions.parallel.start.rank: a rank that computes by plain torch.

A PATH without a compiler would do that on x86 only: ranks on Arm need the barrier of the C kernels.
"""

import sys
from unittest.mock import patch

from oscine.extensions.parallel.start import rank

UNAVAILABLE = ("oscine.ops.platforms.native.unavailable", "oscine.ops.native.library.unavailable")


def none_wanted() -> str:
    return "a test wants none"


if __name__ == "__main__":
    with patch(UNAVAILABLE[0], none_wanted), patch(UNAVAILABLE[1], none_wanted):
        sys.exit(rank.main())
