"""`python -m oscine`: the command line without an installed package."""

import sys

from oscine.cli import main

sys.exit(main())
