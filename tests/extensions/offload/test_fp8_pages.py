"""Pages of keys and values in FP8 in host memory and files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from oscine.executor.kv.allocate import allocate_kv
from oscine.extensions.offload.page_memory import HostMemory
from oscine.extensions.offload.page_store import FileCopy, Job, PageStore, SlotCopy, open_store
from oscine.settings.config import CacheOptions, EngineOptions
from tests.executor.test_fp8 import IN_FP8, plan
from tests.executor.tiny import CPU
from tests.waiting import wait_until


def done(job: Job) -> Job:
    wait_until(lambda: job.state != "running", "the end of the job")
    return job


def store(kv: Any, cache: CacheOptions) -> PageStore:
    memory = HostMemory([pages.view(len(pages), -1).view(torch.uint8).numpy() for pages in kv])
    return open_store(EngineOptions(cache=cache), plan(cache).groups, memory, "m")


def test_offloaded_pages_come_back_and_no_exact_cache_takes_them(tmp_path: Path) -> None:
    cache = replace(IN_FP8, kv_offload_bytes=1 << 20, kv_offload_dir=str(tmp_path))
    kv = allocate_kv(plan(), CPU)
    for pages in kv:
        pages.view(torch.uint8).random_(0, 256)
    before = [pages[3].view(torch.uint8).clone() for pages in kv]
    one = store(kv, cache)
    done(one.save([SlotCopy(0, 3, 0), SlotCopy(1, 3, 1)]))
    number, job = one.write([((0, bytes(16)), 0), ((1, bytes(16)), 1)])
    done(job)
    for pages in kv:
        pages.zero_()
    done(one.load_slots([SlotCopy(0, 5, 0), SlotCopy(1, 5, 1)]))
    done(one.load_files([FileCopy(0, 6, number, 0), FileCopy(1, 6, number, 1)]))
    for page in (5, 6):
        assert all(torch.equal(pages[page].view(torch.uint8), was) for pages, was in zip(kv, before, strict=True))
    one.close()
    exact = replace(cache, kv_cache_dtype="auto")
    other = store(allocate_kv(plan(exact), CPU), exact)
    assert not other.found
    other.close()
    again = store(kv, cache)
    assert [file.number for file in again.found] == [number]
    again.close()
