"""`python -m tests.nodes [arguments of pytest]`: the tests of several nodes, in namespaces of their own.

Prints the reason and succeeds where namespaces are not allowed.
"""

import subprocess
import sys

from tests.nodes.entered import INSIDE, ROOT, command, environment, refusal

# In the new namespaces: temporary folders that end with them, and a loopback device. Bash stays as process 1 and waits
# for orphans: the kernel ends no node before its last process has been waited for.
_BEGIN = """
mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && ip link set lo up || exit 1
"$@"
exit $?
"""


def main(arguments: list[str]) -> int:
    reason = refusal()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    plugins = ["-p", "no:cacheprovider", "-p", "pytest_timeout"]  # named, since none are looked for
    pytest = [sys.executable, "-m", "pytest", *plugins, *(arguments or ["-m", ""]), "tests/nodes"]
    inside = command("bash", "-c", _BEGIN, "nodes", *pytest)
    variables = {INSIDE: "1", "HOME": "/tmp", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(inside, cwd=ROOT, env=environment() | variables).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
