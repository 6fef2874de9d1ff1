"""The adapters in host memory: read from their folders in a thread, packed in the layout of the device, and pinned."""

import hashlib
import mmap
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oscine.checkpoint.hub import ADAPTER
from oscine.extensions.adapters.layout import Packing, place_of, targets_of
from oscine.extensions.formats.lora import Factors, read_factors
from oscine.model.tensors import TensorSpec
from oscine.ops.pinned import pin
from oscine.settings.adapters import TARGETS
from oscine.system.model_files import shown

_PIECE_BYTES = 8 << 20  # pinned, and copied, at a time: the driver is never busy for long


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """One adapter, or a rank's part of it."""

    identity: str  # of its contents, the same on all ranks
    rank: int
    targets: tuple[str, ...]
    num_bytes: int
    pieces: tuple[Tensor, ...]  # of the flat array, one after the other


class HostAdapters:
    """Adapters by their numbers. Any thread may call."""

    def __init__(
        self,
        packing: Packing,
        specs: Mapping[str, TensorSpec],
        targets: tuple[str, ...],
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`specs`: the tensors of the whole model. `max_rank`: that users may have, at most the layout's."""
        self._packing, self._specs, self._targets, self._max_rank = packing, dict(specs), targets, max_rank
        self._dtype, self._pins = dtype, device.type == "cuda"
        self._reading = ThreadPoolExecutor(1, "adapters")
        self._there: dict[int, Future[HostAdapter]] = {}

    def begin(self, number: int, path: str) -> "Future[HostAdapter]":
        """Reads an adapter in a thread, unless it is there. The future raises ValueError, in one line."""
        if number not in self._there:
            self._there[number] = self._reading.submit(self._read, Path(path))
        return self._there[number]

    def drop(self, number: int) -> None:
        self._there.pop(number, None)

    def get(self, number: int) -> HostAdapter:
        """Waits for it."""
        return self._there[number].result()

    def _read(self, folder: Path) -> HostAdapter:
        factors = factors_in(folder, self._specs)
        rank = self._check(folder, factors)
        flat = _aligned(self._packing.layout.size, self._dtype, self._pins)
        self._packing.pack(factors, flat)
        if not torch.isfinite(flat).all():
            raise ValueError(f"{shown(folder)}: a factor is too large for {self._dtype}")
        per_piece = _PIECE_BYTES // self._dtype.itemsize
        pieces = [flat[start : start + per_piece] for start in range(0, len(flat), per_piece)]
        if self._pins:
            for piece in pieces:
                pin(piece, "--enable-lora")
        targets = tuple(targets_of(factors))
        return HostAdapter(_identity(factors), rank, targets, flat.nbytes, tuple(pieces))

    def _check(self, folder: Path, factors: Mapping[str, Factors]) -> int:
        """The highest rank. Raises ValueError for factors that the device has no place for."""
        highest = 0
        for name, (into, _, _) in factors.items():
            if place_of(name) is None:
                raise ValueError(
                    f"{folder}: it changes {shown(name)}, which is possible only in a merged model: see oscine convert"
                )
            highest = max(highest, into.shape[-2])
        if highest > self._max_rank:
            raise ValueError(f"{folder}: it has rank {highest}, and --max-lora-rank is {self._max_rank}")
        for target in targets_of(factors):
            if target not in self._targets:
                there = " ".join(one for one in TARGETS if one in (*self._targets, target))
                raise ValueError(f"{folder}: it changes the {target}, which needs --lora-target-modules {there}")
        return highest


def factors_in(folder: Path, specs: dict[str, TensorSpec]) -> dict[str, Factors]:
    """Those of an adapter. `specs`: the tensors of the whole model. Raises ValueError, in one line."""
    if not folder.is_dir():
        raise ValueError(f"{shown(folder)} is no folder")
    if not (folder / ADAPTER).exists():
        raise ValueError(f"{shown(folder)} has no {ADAPTER}, so it is no LoRA adapter")
    try:
        return read_factors(folder, specs)
    except OSError as error:
        raise ValueError(f"{shown(folder)}: {error}") from None


def _identity(factors: Mapping[str, Factors]) -> str:
    """Hex. Equal factors have equal ones, whatever the folder is called."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(factors):
        into, out_of, scale = factors[name]
        digest.update(f"{name} {tuple(into.shape)} {tuple(out_of.shape)} {scale!r} {into.dtype}".encode())
        for tensor in (into, out_of):
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _aligned(size: int, dtype: torch.dtype, pins: bool) -> Tensor:
    """Zeros. What is pinned begins at a page of its own: none is pinned twice."""
    if not pins:
        return torch.zeros(size, dtype=dtype)
    page = mmap.PAGESIZE
    count = -(-size * dtype.itemsize // page) * page
    raw = torch.zeros(count + page, dtype=torch.uint8)
    start = -raw.data_ptr() % page
    return raw[start : start + count].view(dtype)[:size]
