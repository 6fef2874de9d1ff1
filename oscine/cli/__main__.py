"""`python -m oscine.cli`."""

import sys

from oscine.cli import main

sys.exit(main())
