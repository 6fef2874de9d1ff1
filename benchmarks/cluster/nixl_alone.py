"""NIXL without Oscine, between two processes of this machine: the lower bound for a transfer of pages.

    python -m benchmarks.cluster.nixl_alone [--page-bytes 196608] [--pages 130]

One agent reads pages of another, all in one request, in random order as in a page table. NIXL's own nixlbench is not
part of its Python packages; this is the same measurement with the descriptors of an engine. Prints GB/s of the fastest
of some rounds, once with NIXL's defaults (its thread never sleeps) and once with Oscine's settings.
"""

import argparse
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

_ROUNDS = 7
_LOOK_S = 0.0001


def _agent(name: str, num_bytes: int, *, thread: bool) -> tuple[Any, np.ndarray]:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    from nixl_cu13 import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=thread))
    memory = np.ones(num_bytes, np.uint8)
    agent.register_memory([(memory.ctypes.data, num_bytes, 0, "")], "DRAM")
    return agent, memory


def _serve(pipe: Connection, num_bytes: int, thread: bool) -> None:
    agent, memory = _agent("source", num_bytes, thread=thread)
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    while not pipe.poll(_LOOK_S):
        agent.get_new_notifs()


def measure(page_bytes: int, num_pages: int, *, thread: bool) -> float:
    """GB/s."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, page_bytes * num_pages, thread), daemon=True)
    process.start()
    agent, memory = _agent("target", page_bytes * num_pages, thread=thread)
    metadata, address = pipe.recv()
    peer, order = agent.add_remote_agent(metadata), np.random.default_rng(0)
    seconds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        ours, theirs_P3 = (np.full((num_pages, 3), page_bytes, np.uint64) for _ in range(2))
        for base, found in ((memory.ctypes.data, ours), (address, theirs_P3)):
            found[:, 0] = np.uint64(base) + order.permutation(num_pages).astype(np.uint64) * np.uint64(page_bytes)
            found[:, 2] = 0
        descriptors = (agent.get_xfer_descs(found, "DRAM") for found in (ours, theirs_P3))
        handle = agent.initialize_xfer("READ", *descriptors, peer)
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(_LOOK_S)
            state = agent.check_xfer_state(handle)
        seconds.append(time.perf_counter() - started)
        assert state == "DONE"
        agent.release_xfer_handle(handle)
    pipe.send(None)
    process.join()
    return page_bytes * num_pages / min(seconds) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-bytes", type=int, default=196608, help="bytes per page (default: %(default)s)")
    parser.add_argument("--pages", type=int, default=130, help="pages per transfer (default: %(default)s)")
    arguments = parser.parse_args()
    for thread, name in ((True, "as it comes"), (False, "without its thread")):
        rate = measure(arguments.page_bytes, arguments.pages, thread=thread)
        print(f"NIXL {name}: {rate:.2f} GB/s in {arguments.pages} pages of {arguments.page_bytes} bytes")


if __name__ == "__main__":
    main()
