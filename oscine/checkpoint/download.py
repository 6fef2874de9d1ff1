"""Downloads large files of a Hugging Face repository into the cache of huggingface_hub.

huggingface_hub would start an interrupted file again. Here the download resumes, even in another process. The library
then finds the file as one of its blobs, and links it.
"""

import fcntl
import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

_SHA256 = re.compile("[0-9a-f]{64}")
_PIECE = 1 << 20  # bytes
_AT_ONCE = 4  # files
_TRIES = 5  # attempts in a row that receive no byte
_PAUSE_S = 1.0  # before the second attempt; it doubles
_TIMEOUT_S = 10.0  # without a byte
_LOOK_S = 0.2  # between looks at a file that another process has locked, and at `stop` of peers


@dataclass(frozen=True, slots=True)
class Blob:
    """A file of a repository that the hub names by the hash of its content."""

    name: str
    url: str
    size: int  # bytes
    sha256: str
    path: Path  # in the cache

    @property
    def partial(self) -> Path:
        return self.path.with_name(f"{self.sha256}.incomplete")

    @property
    def held(self) -> int:
        """Bytes that are already downloaded."""
        return next((path.stat().st_size for path in (self.path, self.partial) if path.exists()), 0)


class Peers(Protocol):
    """Other machines that have the same files, or are downloading them. Its methods are called in several threads."""

    stop: threading.Event  # ends downloads, those from the hub included

    def share(self, blobs: list[Blob]) -> None:
        """Lets other machines read these files, or as much of them as is here."""
        ...

    def pieces(self, blob: Blob, start: int) -> Generator[bytes]:
        """The bytes of a file from `start` on, and an empty piece at times while it waits for more.

        Ends early where no other machine has more and the hub is to be asked.
        """
        ...


def blobs_of(repo_id: str, revision: str | None, cache_dir: str | None, wanted: Callable[[str], bool]) -> list[Blob]:
    """Raises the errors of huggingface_hub, and ValueError for a file that has no hash for a name."""
    from huggingface_hub import HfApi, constants, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    found = HfApi().model_info(repo_id, revision=revision, files_metadata=True)
    folder = Path(cache_dir or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type="model") / "blobs"
    blobs = []
    for file in found.siblings or ():
        if not wanted(file.rfilename) or file.lfs is None or not file.size:
            continue
        sha256 = file.lfs.sha256
        if not _SHA256.fullmatch(sha256):
            raise ValueError(f"{file.rfilename}: {sha256!r} is no SHA-256")
        url = hf_hub_url(repo_id, file.rfilename, revision=found.sha)
        blobs.append(Blob(file.rfilename, url, file.size, sha256, folder / sha256))
    return blobs


def fetch_blobs(blobs: list[Blob], peers: Peers | None = None) -> None:
    """Downloads what is missing, with one progress bar: from `peers` if they have it, else from the hub.

    Raises ValueError for what the user can mend, and when `peers` stop.
    """
    from huggingface_hub import constants
    from tqdm import tqdm

    if peers is not None:
        peers.share(blobs)

    missing = [blob for blob in blobs if not blob.path.exists()]
    if not missing:
        return
    folder = missing[0].path.parent
    folder.mkdir(parents=True, exist_ok=True)
    _check_space(missing, folder)
    held, total = (sum(getattr(blob, what) for blob in blobs) for what in ("held", "size"))
    stop, quiet = threading.Event(), bool(constants.HF_HUB_DISABLE_PROGRESS_BARS)
    with (
        tqdm(desc="Downloading", initial=held, total=total, unit="B", unit_scale=True, disable=quiet) as bar,
        ThreadPoolExecutor(_AT_ONCE) as threads,
    ):
        try:  # the end of `threads` waits for downloads, so whatever ends this must stop them first
            running = {threads.submit(_Download(blob, bar, stop, peers).run) for blob in missing}
            while running:
                done, running = wait(running, _LOOK_S, FIRST_EXCEPTION)
                for one in done:
                    one.result()
                if peers is not None and peers.stop.is_set():
                    raise ValueError("the download was ended")
        finally:
            stop.set()


def _check_space(missing: list[Blob], folder: Path) -> None:
    needed, free = sum(blob.size - blob.held for blob in missing), shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{needed / 1e9:.1f} GB are missing, and {folder} has room for {free / 1e9:.1f} GB; --download-dir names "
            "another folder"
        )


@dataclass(frozen=True, slots=True)
class _Download:
    blob: Blob
    bar: "tqdm[Any]"
    stop: threading.Event
    peers: Peers | None = None

    def run(self) -> None:
        blob = self.blob
        while not blob.path.exists() and not self.stop.is_set():
            with blob.partial.open("ab") as file:
                if self._lock(file) and _is_at(blob.partial, file):
                    self._finish(file)

    def _lock(self, file: BinaryIO) -> bool:
        """Waits while another process downloads the file. False: the download is to stop."""
        while not self.stop.is_set():
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            self.stop.wait(_LOOK_S)
        return False

    def _finish(self, file: BinaryIO) -> None:
        file.seek(0, os.SEEK_END)
        self._fill_from_peers(file)
        self._fill(file)
        if self.stop.is_set():
            return
        if self.peers is not None and not _is_whole(self.blob):  # whichever process wrote it
            logger.warning("%s arrived damaged; the hub is asked for all of it", self.blob.name)
            self._empty(file)
            self._fill(file)
        if self.stop.is_set():
            return
        if not _is_whole(self.blob):
            self.blob.partial.unlink()
            raise ValueError(f"{self.blob.name} arrived damaged and was removed; fetch it again")
        os.replace(self.blob.partial, self.blob.path)

    def _fill_from_peers(self, file: BinaryIO) -> None:
        if self.peers is None or file.tell() >= self.blob.size:
            return
        with closing(self.peers.pieces(self.blob, file.tell())) as pieces:
            for piece in pieces:
                if self.stop.is_set() or self.peers.stop.is_set():
                    break
                self._write(file, piece)

    def _write(self, file: BinaryIO, piece: bytes) -> None:
        file.write(piece)
        file.flush()
        self.bar.update(len(piece))

    def _empty(self, file: BinaryIO) -> None:
        self.bar.update(-file.tell())
        file.seek(0)
        file.truncate()

    def _fill(self, file: BinaryIO) -> None:
        import httpx

        tries = 0
        while not self.stop.is_set() and (before := file.tell()) < self.blob.size:
            try:
                self._go_on(file, before)
            except httpx.HTTPStatusError as error:
                raise ValueError(f"{self.blob.name} cannot be fetched: {error.response.status_code}") from None
            except httpx.TransportError as error:
                tries = 1 if file.tell() > before else tries + 1
                if tries == _TRIES:
                    raise ValueError(f"{self.blob.name} cannot be fetched: {error or type(error).__name__}") from None
                self.stop.wait(_PAUSE_S * 2 ** (tries - 1))

    def _go_on(self, file: BinaryIO, start: int) -> None:
        import httpx
        from huggingface_hub import get_token

        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        if token := get_token():
            headers["Authorization"] = f"Bearer {token}"  # httpx keeps it from other hosts
        with httpx.stream("GET", self.blob.url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S) as answer:
            answer.raise_for_status()
            if start and answer.status_code != httpx.codes.PARTIAL_CONTENT:
                self._empty(file)  # the server does not know ranges
            for piece in answer.iter_raw(_PIECE):
                if self.stop.is_set():
                    return
                self._write(file, piece)


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Whether an open file has not been renamed or removed."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def _is_whole(blob: Blob) -> bool:
    with blob.partial.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == blob.sha256
