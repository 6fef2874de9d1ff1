"""Packed weights in files: mapped at the second start, written again if incomplete, kept in memory without room."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.inputs import random_experts
from oscine.checkpoint.opened import open_model
from oscine.model import packed
from oscine.model.packed import PackedFiles, page_out
from oscine.ops.moe import native as native_moe
from oscine.ops.native.library import unavailable
from oscine.ops.native.weights import PackedDense, PackedExperts, pack_dense
from oscine.ops.platforms.table import choose, resolve
from oscine.ops.target import Target
from oscine.settings.config import ModelOptions

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")


def dense() -> PackedDense:
    found = pack_dense(torch.randn(40, 70).bfloat16(), "int8")
    assert isinstance(found, PackedDense)
    return found


def experts() -> PackedExperts:
    cpu = torch.device("cpu")
    return native_moe.prepare_experts(random_experts(3, 64, 32, cpu, torch.float32, scales=(118, 124)))


def never() -> object:
    raise AssertionError("it is in its file")


def files(folder: Path, said: list[str] | None = None) -> PackedFiles:
    return PackedFiles(folder, 1 << 20, (said if said is not None else []).append)


def parts(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [part for name in value.__slots__ if isinstance(part := getattr(value, name), Tensor)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [dense, experts, lambda: torch.randn(7, 5).bfloat16()])
def test_a_second_start_maps_what_the_first_one_made(make: object, tmp_path: Path) -> None:
    assert callable(make)
    made = make()
    first = files(tmp_path).get("weight", lambda: made)
    second = files(tmp_path).get("weight", never)
    assert type(first) is type(second) is type(made)
    for one, two, expected in zip(parts(first), parts(second), parts(made), strict=True):
        assert torch.equal(one, expected)
        assert torch.equal(two, expected)
    if isinstance(made, PackedExperts):
        assert (second.gate_up_blocks, second.down_blocks) == (made.gate_up_blocks, made.down_blocks)
    assert [path.name for path in tmp_path.iterdir()] == ["weight"]


@pytest.mark.parametrize("cut", [0, 100, 5000])
def test_an_incomplete_file_is_written_again(cut: int, tmp_path: Path) -> None:
    made = dense()
    files(tmp_path).get("weight", lambda: made)
    path = tmp_path / "weight"
    path.write_bytes(path.read_bytes()[:cut])
    again = files(tmp_path).get("weight", lambda: made)
    assert torch.equal(again.packed, made.packed)
    assert torch.equal(files(tmp_path).get("weight", never).packed, made.packed)  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", [(b'"uint8"', b'"uint9"'), (b'"kind"', b'"sort"')])
def test_a_header_that_says_something_else_is_written_again(change: tuple[bytes, bytes], tmp_path: Path) -> None:
    made, path = dense(), tmp_path / "weight"
    files(tmp_path).get("weight", lambda: made)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(*change))
    assert path.read_bytes() != whole
    assert torch.equal(files(tmp_path).get("weight", lambda: made).packed, made.packed)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("make", "change"),
    [(dense, (b"[40, 70]", b"[40, 99]")), (experts, (b'"gate_up_blocks": 2', b'"gate_up_blocks": 3'))],
)
def test_a_header_whose_shape_needs_other_bytes_is_written_again(
    make: Callable[[], object], change: tuple[bytes, bytes], tmp_path: Path
) -> None:
    made, path = make(), tmp_path / "weight"
    files(tmp_path).get("weight", lambda: made)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(*change))
    assert path.read_bytes() != whole
    again = files(tmp_path).get("weight", lambda: made)
    assert all(torch.equal(one, two) for one, two in zip(parts(again), parts(made), strict=True))
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 4096,
        b'{"checksum": 0, "of": ' + b"[" * 4000,
        b"\xff" * 5000,
        b"null",
        b'{"checksum": 1e999}',
        b"0" * 5000,
    ],
)
def test_garbage_is_written_again(data: bytes, tmp_path: Path) -> None:
    made, path = dense(), tmp_path / "weight"
    path.write_bytes(data)
    assert torch.equal(files(tmp_path).get("weight", lambda: made).packed, made.packed)
    assert torch.equal(files(tmp_path).get("weight", never).packed, made.packed)  # type: ignore[attr-defined]


def test_a_weight_of_other_tensors_is_written_again(tmp_path: Path) -> None:
    """Its own header is right, but the model wants another one."""
    made = torch.arange(12).view(3, 4)
    for other in ({"a": (4, 3)}, {"b": (3, 4)}, {"a": (3, 4), "b": (3, 4)}):
        files(tmp_path).get("weight", lambda: made + 1, of=other)
        assert torch.equal(files(tmp_path).get("weight", lambda: made, of={"a": (3, 4)}), made)
    assert torch.equal(files(tmp_path).get("weight", never, of={"a": torch.Size((3, 4))}), made)  # type: ignore[arg-type]


@pytest.mark.long
def test_files_that_changed_places_are_written_again(tmp_path: Path) -> None:
    """The head and the embedding have the same shape, but not the same form."""
    opened = open_model(ModelOptions(device="cpu"))
    target = replace(Target.of(opened.device), cpu_weights="int8")
    ops, head, embedding = resolve(target, choose("native")), tmp_path / "lm_head.weight", "model.embed_tokens.weight"
    opened.load(ops=ops, files=files(tmp_path))
    before = head.stat().st_ino
    opened.load(ops=ops, files=files(tmp_path))
    assert head.stat().st_ino == before
    content = head.read_bytes()
    head.unlink()
    (tmp_path / embedding).rename(head)
    (tmp_path / embedding).write_bytes(content)
    weights = opened.load(ops=ops, files=files(tmp_path))
    assert isinstance(weights.head_VH, PackedDense)
    assert isinstance(weights.embed_VH, Tensor)
    assert head.read_bytes() == content


def test_a_file_that_others_may_change_is_written_again(tmp_path: Path) -> None:
    made, path = dense(), tmp_path / "weight"
    files(tmp_path).get("weight", lambda: made)
    path.chmod(0o666)
    files(tmp_path).get("weight", lambda: made)
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    path.symlink_to("/dev/zero")
    files(tmp_path).get("weight", lambda: made)
    assert not path.is_symlink()


def test_a_folder_that_others_may_change_is_not_used(tmp_path: Path) -> None:
    folder, said, made = tmp_path / "packed", list[str](), dense()
    folder.mkdir()
    folder.chmod(0o777)
    assert files(folder, said).get("weight", lambda: made) is made
    assert list(folder.iterdir()) == []
    assert said == [
        "weights are packed again at every start, and processes do not share them: every user may write to "
        f"{folder} (a folder below it would do)"
    ]


def test_a_pipe_in_the_place_of_a_file_is_no_reason_to_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "weight")
    made = dense()
    assert torch.equal(files(tmp_path).get("weight", lambda: made).packed, made.packed)


def test_what_a_killed_start_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    names = ("weight.01234567.part", "mine.part")
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "other.01234567.part").symlink_to("nowhere")
    said: list[str] = []
    files(tmp_path, said).get("weight", dense)
    assert sorted(os.listdir(tmp_path)) == ["mine.part", "other.01234567.part", "weight"]
    assert len(said) == 1
    assert "written to" in said[0]


def test_without_room_on_the_disk_weights_are_made_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    said: list[str] = []
    made = dense()
    assert files(tmp_path, said).get("weight", lambda: made) is made
    assert not list(tmp_path.iterdir())
    assert len(said) == 1
    assert "at every start" in said[0]


def test_weights_stay_in_memory_when_the_disk_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed.os, "fsync", full)
    said: list[str] = []
    some, made = files(tmp_path, said), dense()
    assert some.get("a", lambda: made) is made
    assert some.get("b", lambda: made) is made
    assert not list(tmp_path.iterdir())
    assert sum("No space left" in line for line in said) == 1


def test_paged_out_weights_are_read_again(tmp_path: Path) -> None:
    mapped = files(tmp_path).get("weight", lambda: torch.arange(100_000))
    own = torch.arange(100_000)
    page_out([mapped, own])
    assert torch.equal(mapped, own)
    assert torch.equal(own, torch.arange(100_000))
