"""Attacks by files: hostile batches, quotas that are filled at once, links planted in the server's folders."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.serving.promises import require, wait
from benchmarks.serving.server import Server
from benchmarks.serving.siege.clients import GREEDY, HEALTHY, HOSTILE, ask, upload
from benchmarks.serving.siege.measures import bytes_below, known_files
from benchmarks.serving.siege.shapes import CHAT, chat
from benchmarks.serving.siege.verdicts import files_fault, quota_fault

MAX_FILES_BYTES = 100_000_000  # of one key
MAX_BATCHES = 16  # of one key at a time
UPLOADS = 8
UPLOAD_BYTES = 24_000_000
BATCH_S = 15.0  # then a batch is cancelled
FILES = "/v1/files"
BATCHES = "/v1/batches"
ENDED = ("completed", "failed", "cancelled", "expired")
LINE = (
    b'{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 10000}}\n'
)
HEAD = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": '
HOSTILE_FILES: dict[str, Sequence[bytes]] = {
    "20 MB of line breaks": [b"\n" * 1_000_000] * 20,
    "a line of 60 MB": [HEAD, b'"', *[b"a" * 1_000_000] * 60, b'"}}\n'],
    "a line of 60 MB of values": [HEAD, b"[", *[b"[]," * 333_333] * 60, b"1]}}\n"],
    "a million lines": [b'{"custom_id": "a"}\n' * 10_000] * 100,
}


def batch_of(content: Sequence[bytes]) -> Callable[[Server], str]:
    """A batch of this file: it ends, by itself or once it is cancelled."""

    def run(server: Server) -> str:
        status, file = upload(server, HOSTILE, content)
        if status != 200:
            require(status in (400, 413), f"the upload is answered with {status} {file}")
            return f"the upload is refused with {status}"
        given = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        status, batch = ask(server, HOSTILE, BATCHES, given)
        try:
            if status != 200:
                require(status in (400, 413), f"the batch is answered with {status} {batch}")
                return f"the batch is refused with {status}"
            path = f"{BATCHES}/{batch['id']}"
            if not _has_ended(server, path):
                ask(server, HOSTILE, f"{path}/cancel", {})
                require(_has_ended(server, path), "the batch does not end when it is cancelled")
            return f"the batch has {ask(server, HOSTILE, path)[1]['status']}"
        finally:
            _delete_files(server, HOSTILE)

    return run


def _has_ended(server: Server, path: str) -> bool:
    return wait(lambda: ask(server, HOSTILE, path)[1]["status"] in ENDED, BATCH_S)


def _delete_files(server: Server, key: bytes) -> None:
    for file in ask(server, key, f"{FILES}?limit=1000")[1]["data"]:
        ask(server, key, f"{FILES}/{file['id']}", method="DELETE")


def together(run: Callable[[int], Any], count: int) -> list[Any]:
    with ThreadPoolExecutor(count) as threads:
        return [*threads.map(run, range(count))]


def uploads_together(folder: Path) -> Callable[[Server], str]:
    """Uploads that together exceed the quota, all begun at once. `folder`: the server's folder for files."""

    def run(server: Server) -> str:
        most = before = bytes_below(folder)

        def one(_: int) -> int:
            nonlocal most
            status, _answer = upload(server, GREEDY, [b"{}\n" * 100_000] * (UPLOAD_BYTES // 300_000))
            most = max(most, bytes_below(folder))
            return status

        statuses = together(one, UPLOADS)
        stored = sum(file["bytes"] for file in ask(server, GREEDY, f"{FILES}?limit=1000")[1]["data"])
        _delete_files(server, GREEDY)
        faults = (
            quota_fault("bytes of files", stored, MAX_FILES_BYTES),
            quota_fault("bytes in the folder of files", most - before, MAX_FILES_BYTES + (8 << 20)),  # and the index
        )
        require(not any(faults), "; ".join(filter(None, faults)))
        require(200 in statuses, f"no upload was accepted: {statuses}")
        return f"{stored / 1e6:.0f} MB of {UPLOADS * UPLOAD_BYTES / 1e6:.0f} are kept"

    return run


def batches_together(server: Server) -> str:
    """More batches than a key may have, begun at once."""
    status, file = upload(server, GREEDY, [LINE % i for i in range(1000)])
    require(status == 200, f"the upload is answered with {status} {file}")
    given = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    answers = together(lambda _: ask(server, GREEDY, BATCHES, given), 3 * MAX_BATCHES)
    taken = [batch["id"] for status, batch in answers if status == 200]
    for batch in taken:
        ask(server, GREEDY, f"{BATCHES}/{batch}/cancel", {})
    wait(lambda: all(_ended(server, batch) for batch in taken), BATCH_S)
    _delete_files(server, GREEDY)
    fault = quota_fault("batches", len(taken), MAX_BATCHES)
    require(fault is None, str(fault))
    require(bool(taken), f"no batch was accepted: {answers[0]}")
    return f"{len(taken)} of {len(answers)} batches were taken"


def _ended(server: Server, batch: str) -> bool:
    return ask(server, GREEDY, f"{BATCHES}/{batch}")[1]["status"] in ENDED


# ---- links ----


def plant(root: Path) -> tuple[Path, Path]:
    """Folders for a server, with links to files of others, and one of theirs among its own. Returns those of others."""
    others = root / "others"
    for name in ("pages", "folder"):
        (others / name / "inside").mkdir(parents=True)
        for file in ("lock", "index.db", "0000", "oscine.lock"):
            (others / name / file).write_bytes(b"of another")
            (others / name / "inside" / file).write_bytes(b"of another")
            os.utime(others / name / "inside" / file, (0, 0))
    for name in ("kv", "files", "tmp"):
        (root / name).mkdir(mode=0o700)
    (root / "kv" / "model").symlink_to(others / "pages")
    (root / "kv" / "real").mkdir()
    (root / "kv" / "real" / "engine").symlink_to(others / "pages" / "inside")
    (root / "kv" / "lock").symlink_to(others / "pages" / "lock")
    for name in ("index.db", "index.db-wal", "lock", "file-0.jsonl"):
        (root / "files" / name).symlink_to(others / "folder" / "index.db")
    for name in (f"oscine-{os.getuid()}", "oscine", "oscine-files-planted", "oscine-files-"):
        (root / "tmp" / name).symlink_to(others / "folder")
    guest = root / "kv" / "guest"
    (guest / "inside").mkdir(parents=True)
    for file in ("lock", "picture"):
        (guest / "inside" / file).write_bytes(b"of another")
    return others, guest


def planted_links(root: Path) -> str:
    """A server starts over links, keeps pages and files, and ends: what the links point to must stay as it is."""
    others, guest = plant(root)
    before = known_files(others) | known_files(guest)
    common, fake = ["--log-level", "error", "--api-key=healthy-key"], ["--executor", "fake"]
    pages = ["--kv-offload-bytes", "16MB", "--kv-offload-dir", str(root / "kv")]  # of the embedded model
    environment = {"TMPDIR": str(root / "tmp"), "HOME": str(root / "tmp")}
    outcomes = []
    for given in (
        pages,
        [*fake, "--files-dir", str(root / "files")],
        fake,
    ):  # a refusal of one kind must not hide the others
        began_s = time.monotonic()
        with open(os.devnull, "wb") as log, contextlib.ExitStack() as stack:
            try:
                server = stack.enter_context(Server(*common, *given, environment=environment, log=log))
            except RuntimeError:
                outcomes.append(f"refused after {time.monotonic() - began_s:.0f} s")
                continue
            ask(server, HEALTHY, CHAT, chat())
            upload(server, HEALTHY, [b"{}\n"])
            outcomes.append("started")
    fault = files_fault(before, known_files(others) | known_files(guest))
    require(fault is None, str(fault))
    return f"a server with links among its pages: {outcomes[0]}, files: {outcomes[1]}, temporary files: {outcomes[2]}"
