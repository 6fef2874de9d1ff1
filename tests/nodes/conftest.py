"""Tests of several nodes run inside namespaces: `make nodes` enters them, and so does the short part of `make test`."""

import os
from pathlib import Path

from tests.nodes.entered import INSIDE

_OUTSIDE = "test_short_part.py"
_INNER = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != _OUTSIDE]

collect_ignore = [_OUTSIDE] if INSIDE in os.environ else _INNER
