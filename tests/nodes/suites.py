"""`python -m tests.nodes.suites [names]`: benchmarks of clusters, with a cluster on four nodes.

Each is a program of benchmarks/cluster that ends with status 1 if something is not as it should be. It runs on the
first node, and its cluster on all four.
"""

import subprocess
import sys
import time

from benchmarks.cluster.cluster import OTHER_RAY
from tests.nodes.bed import Bed, Node
from tests.nodes.cluster import ENVIRONMENT, start_ray
from tests.nodes.entered import ROOT, run_inside

SUITES = ("demo", "rollout", "chaos", "ramp")
LIMIT_S = 1200.0  # of one: it hangs
_DEMO = "/tmp/demo.yaml"


def main(arguments: list[str]) -> int:
    unknown = sorted(set(arguments) - set(SUITES))
    if unknown:
        print(f"no suite is called {', '.join(unknown)}: {', '.join(SUITES)}", file=sys.stderr)
        return 2
    return run_inside(sys.executable, "-m", "tests.nodes.suites", "inside", *(arguments or SUITES))


def inside(names: list[str]) -> int:
    failed = []
    with Bed(4) as bed:
        for number, node in enumerate(bed.nodes):
            start_ray(node, head=number == 0)
        for name in names:
            began_s = time.monotonic()
            status = run(bed.nodes[0], name)
            verdict = "FAILED" if status else "as it should be"
            print(f"{name}: {verdict}, {time.monotonic() - began_s:.0f} s", flush=True)
            failed += [name] * (status != 0)
            if status:  # its cluster may still run
                break
    return int(bool(failed))


def run(node: Node, name: str) -> int:
    arguments = [_demo(node)] if name == "demo" else ["--image", "/tmp/ramp.svg"] if name == "ramp" else []
    command = (sys.executable, "-m", f"benchmarks.cluster.{name}", *arguments)
    environment = ENVIRONMENT | {OTHER_RAY: ENVIRONMENT["RAY_ADDRESS"]}
    process = node.popen(*command, env=environment, stdout=None)
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return 124


def _demo(node: Node) -> str:
    """The same deployment, with an ingress that other nodes reach."""
    text = (ROOT / "examples" / "cluster" / "demo.yaml").read_text()
    assert "ingress: {port: 0}" in text
    text = text.replace("ingress: {port: 0}", 'ray: auto\ningress: {host: 0.0.0.0, port: 0, allowed-hosts: ["*"]}')
    node.run("bash", "-c", f"cat >{_DEMO} <<'E'\n{text}\nE")
    return _DEMO


if __name__ == "__main__":
    sys.exit(inside(sys.argv[2:]) if sys.argv[1:2] == ["inside"] else main(sys.argv[1:]))
