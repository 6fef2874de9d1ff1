"""`python -m tests.nodes [arguments of pytest]`: the tests of several nodes, in namespaces of their own.

Prints the reason and succeeds where namespaces are not allowed.
"""

import sys

from tests.nodes.entered import run_inside


def main(arguments: list[str]) -> int:
    plugins = ["-p", "no:cacheprovider", "-p", "pytest_timeout"]  # named, since none are looked for
    return run_inside(sys.executable, "-m", "pytest", *plugins, *(arguments or ["-m", ""]), "tests/nodes")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
