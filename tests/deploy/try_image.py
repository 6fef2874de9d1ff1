"""Starts an image and asks it a question: `python -m tests.deploy.try_image [IMAGE]`, as `make image-test` does.

Podman runs it as the documents say: without privileges, with a read-only root file system. Where the kernel allows no
containers, `--chroot` lets buildah run it: as the image's user, without a root file system or a network of its own.
"""

import argparse
import json
import re
import subprocess
import sys
import threading
import urllib.request
from typing import Any

READY_S = 120.0
QUESTION = {"messages": [{"role": "user", "content": "What is 27 + 58?"}], "temperature": 0}
LOCKED_DOWN = ("--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges")
_URL = re.compile(r"http://\S+")


def command(image: str, chroot: bool, more: list[str]) -> list[str]:
    serve = ["serve", "--host", "127.0.0.1", "--port", "0"]
    if not chroot:
        return ["podman", "run", "--rm", "--network=host", "--stop-timeout=60", *LOCKED_DOWN, *more, image, *serve]
    made = subprocess.run(["buildah", "from", "--pull-never", image], capture_output=True, text=True, check=True)
    return ["buildah", "run", "--isolation=chroot", made.stdout.strip(), "--", "oscine", *serve]


def get(url: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def read_url(process: "subprocess.Popen[str]") -> str:
    """The URL in the first line that a server prints, once it is ready."""
    assert process.stdout is not None
    overdue = threading.Timer(READY_S, process.kill)
    overdue.start()
    told = _URL.search(process.stdout.readline())
    overdue.cancel()
    if told is None:
        raise SystemExit("the server did not become ready")
    return told[0]


def ask_server(arguments: list[str], *, signals: bool = True) -> str:
    """The answer of a server that is started for it. `signals`: whether SIGTERM reaches it."""
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = read_url(process)
            answer = str(get(f"{url}/v1/chat/completions", QUESTION)["choices"][0]["message"]["content"])
        finally:
            process.terminate()
        status = process.wait(timeout=60)
    if status and signals:
        raise SystemExit(f"the server answered {answer!r}, and ended with status {status}")
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description="Starts an image and asks it a question.")
    parser.add_argument("image", nargs="?", default="localhost/oscine:cpu")
    parser.add_argument("--chroot", action="store_true", help="run it by buildah, without containers")
    parser.add_argument(
        "--podman", metavar="OPTION", action="append", default=[], help="a further option of podman run"
    )
    args = parser.parse_args()
    answer = ask_server(command(args.image, args.chroot, args.podman), signals=not args.chroot)
    print(f"{args.image} answered: {answer}")
    sys.exit("85" not in answer)


if __name__ == "__main__":
    main()
