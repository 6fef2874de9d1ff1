"""Pages that go to slots and to files and come back, with the store's own threads."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from oscine.extensions.offload.page_files import PageFiles
from oscine.extensions.offload.page_memory import HostMemory, PageBytes
from oscine.extensions.offload.page_store import FileCopy, Job, PageStore, SlotCopy
from oscine.kv_group import KVGroup
from tests.waiting import wait_until

GROUPS = [KVGroup(None, (0, 1), 2, 16, 8, "float32"), KVGroup(24, (2,), 2, 16, 8, "float32")]
PAGES = 12


def done(job: Job) -> Job:
    wait_until(lambda: job.state != "running", "the end of the job")
    return job


class Setup:
    def __init__(self, folder: Path | None = None, slots: int = 8) -> None:
        rng = np.random.default_rng(0)
        self.arrays = [rng.integers(0, 256, (PAGES, group.page_bytes), np.uint8) for group in GROUPS]
        self.before = [array.copy() for array in self.arrays]
        files = None if folder is None else PageFiles(folder, "m")
        self.store = PageStore(GROUPS, HostMemory(self.arrays), slots * GROUPS[0].page_bytes, files)


def test_pages_come_back_from_slots_to_other_places() -> None:
    setup = Setup()
    saved = [SlotCopy(0, 3, 7), SlotCopy(1, 4, 0), SlotCopy(0, 5, 2)]
    job = done(setup.store.save(saved))
    assert (job.state, job.error) == ("done", None)
    assert job.num_bytes == 2 * GROUPS[0].page_bytes + GROUPS[1].page_bytes
    for array in setup.arrays:
        array.fill(0)
    done(setup.store.load_slots([SlotCopy(copy.group, copy.page + 1, copy.slot) for copy in saved]))
    for group, page, _ in saved:
        assert (setup.arrays[group][page + 1] == setup.before[group][page]).all()
    assert not setup.arrays[0][3].any()
    setup.store.close()


def test_pages_come_back_from_files_also_of_an_earlier_store(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    done(setup.store.save([SlotCopy(0, 3, 7), SlotCopy(1, 4, 0)]))
    keys = [(0, bytes(16)), (1, bytes(range(16)))]
    number, job = setup.store.write([(keys[0], 7), (keys[1], 0)])
    assert done(job).state == "done"
    for array in setup.arrays:
        array.fill(0)
    for _ in range(2):
        done(setup.store.load_files([FileCopy(1, 9, number, 1), FileCopy(0, 8, number, 0)]))
        assert (setup.arrays[0][8] == setup.before[0][3]).all()
        assert (setup.arrays[1][9] == setup.before[1][4]).all()
        setup.store.close()
        setup = Setup(tmp_path)
        [found] = setup.store.found
        assert (found.number, found.keys) == (number, keys)
    second, job = setup.store.write([(keys[0], 1)])
    assert done(job).state == "done"
    assert second > number
    setup.store.remove(number)
    setup.store.close()
    assert [file.number for file in Setup(tmp_path).store.found] == [second]


def test_a_copy_that_fails_for_any_reason_is_not_done(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    job = done(setup.store.load_files([FileCopy(0, 1, 99, 0)]))
    assert (job.state, job.bad_file) == ("failed", 99)

    class Broken(HostMemory):
        def load(self, pages: Sequence[PageBytes]) -> None:
            raise RuntimeError("no device")

    setup.store._memory = Broken([])
    job = done(setup.store.load_slots([SlotCopy(0, 1, 2)]))
    assert (job.state, job.error, job.bad_file) == ("failed", "RuntimeError: no device", None)


def test_a_copy_that_is_cancelled_ends_as_failed_once_nothing_is_written_any_more() -> None:
    setup, begun, go = Setup(), threading.Event(), threading.Event()

    class Slow(HostMemory):
        def load(self, pages: Sequence[PageBytes]) -> None:
            begun.set()
            go.wait(30)
            super().load(pages)

    setup.store._memory = Slow(setup.arrays)
    setup.store._chunk = 1
    job = setup.store.load_slots([SlotCopy(0, page, page) for page in range(8)])
    begun.wait(30)
    job.cancel()
    assert job.state == "running"
    go.set()
    assert done(job).state == "failed"
    assert (setup.arrays[0][7] == setup.before[0][7]).all()


def test_memory_that_holds_no_page_is_an_error() -> None:
    with pytest.raises(ValueError, match="--kv-offload-bytes must hold a page of"):
        PageStore(GROUPS, HostMemory([]), GROUPS[0].page_bytes - 1)


def test_a_kernel_without_huge_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscine.extensions.offload.page_store.mmap.MADV_HUGEPAGE", 999)
    assert Setup().store.num_slots == 8


@pytest.mark.gpu
def test_pages_of_a_gpu_come_back_from_slots_and_files(tmp_path: Path) -> None:
    import torch

    from oscine.extensions.offload.page_memory import CudaMemory

    arrays = [torch.randint(0, 256, (PAGES, group.page_bytes), dtype=torch.uint8, device="cuda") for group in GROUPS]
    before = [array.clone() for array in arrays]
    store = PageStore(GROUPS, CudaMemory(arrays), 8 * GROUPS[0].page_bytes, PageFiles(tmp_path, "m"))
    torch.cuda.synchronize()
    done(store.save([SlotCopy(0, 3, 1), SlotCopy(1, 4, 2)]))
    number, job = store.write([((0, b"a"), 1), ((1, b"b"), 2)])
    done(job)
    for array in arrays:
        array.zero_()
    torch.cuda.synchronize()
    assert done(store.load_slots([SlotCopy(0, 7, 1), SlotCopy(1, 5, 2)])).state == "done"
    assert done(store.load_files([FileCopy(0, 8, number, 0), FileCopy(1, 9, number, 1)])).state == "done"
    assert (arrays[0][7] == before[0][3]).all()
    assert (arrays[0][8] == before[0][3]).all()
    assert (arrays[1][5] == before[1][4]).all()
    assert (arrays[1][9] == before[1][4]).all()
    assert not arrays[0][:7].any()
