"""Tensors on their way to a GPU are cut into pieces; the GPU itself is not needed for that."""

import pytest
import torch
from torch import Tensor

from oscine.model import staging


@pytest.mark.parametrize("piece_bytes", [8, 64, 100, 1 << 20])
@pytest.mark.parametrize(
    "source",
    [
        torch.arange(40, dtype=torch.uint8),
        torch.arange(60).view(5, 12).bfloat16(),
        torch.arange(96, dtype=torch.uint8).view(4, 6, 4)[:, 1:4],
        torch.arange(96, dtype=torch.uint8).view(4, 6, 4)[:, :, 1:3],
        torch.arange(60).view(5, 12).bfloat16()[:, 3:9],
        torch.empty((0, 3), dtype=torch.bfloat16),
        torch.empty((3, 0), dtype=torch.uint8),
    ],
    ids=["a row", "a matrix", "rows of experts", "columns of experts", "columns", "no rows", "no columns"],
)
def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch, source: Tensor, piece_bytes: int) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", piece_bytes)
    target = torch.zeros(source.shape, dtype=source.dtype)
    for piece, place in staging.pieces(source, target):
        assert piece.shape == place.shape
        assert piece.nbytes <= piece_bytes
        assert place.is_contiguous()
        place.copy_(piece)
    assert torch.equal(target, source)


def test_a_strided_part_of_a_file_is_not_copied_on_the_host() -> None:
    part = torch.zeros((4, 6, 4), dtype=torch.uint8)[:, :, 1:3]
    [(piece, _)] = staging.pieces(part, torch.zeros(part.shape, dtype=torch.uint8))
    assert piece.data_ptr() == part.data_ptr()


@pytest.mark.gpu
def test_parts_come_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 1000)
    brought, source = staging.Staging(torch.device("cuda")), torch.randn(30, 40, 8).bfloat16()
    for part in (source, source[10:], source[:, 3:30], source[:, :, 2:7]):
        found = brought.bring(part)
        assert found.is_contiguous()
        assert torch.equal(found.cpu(), part)
