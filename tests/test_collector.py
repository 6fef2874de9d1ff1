"""Python's garbage collector beside large requests."""

import asyncio
import gc
import subprocess
import sys
from pathlib import Path

import pytest

from oscine.system import collector
from oscine.system.collector import collect_when_quiet, paused, set_apart

ROOT = Path(__file__).parent.parent


def test_what_is_set_apart_is_traversed_by_no_collection_of_young_objects() -> None:
    gc.unfreeze()
    gc.freeze()
    before = gc.get_freeze_count()
    with set_apart():
        made = [[] for _ in range(10_000)]  # type: ignore[var-annotated]
    assert gc.get_freeze_count() >= before + 10_000
    assert not any(made)
    gc.unfreeze()
    assert gc.isenabled()


@pytest.mark.long
def test_all_objects_are_collected_in_quiet_moments_or_after_a_while() -> None:
    """In a process of its own: to count what is set apart goes through all of it, in a worker a million objects."""
    done = subprocess.run([sys.executable, "-m", __name__], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "as it should be\n"), done.stderr


def collect_at_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_EVERY_S", 0.0)
    monkeypatch.setattr(collector, "_MANY_OBJECTS", 1000)
    made = 0
    quiet = False

    def collected() -> int:
        nonlocal made
        made += 1
        return 0

    async def turns() -> int:
        for _ in range(10):
            await asyncio.sleep(0)
        return made

    async def go() -> None:
        nonlocal quiet
        gc.set_threshold(700, 10, 10)
        usual = gc.get_threshold()
        collecting = asyncio.create_task(collect_when_quiet(lambda: quiet))
        assert await turns() == 1, "what the start has made"
        assert gc.get_threshold()[:2] == usual[:2]
        assert gc.get_threshold()[2] > usual[2]
        with set_apart():
            kept = [[] for _ in range(5000)]  # type: ignore[var-annotated]
        assert await turns() == 1, "large requests are held"
        quiet = True
        assert await turns() == 2
        assert await turns() == 2, "nothing new"
        del kept
        assert await turns() == 2
        with set_apart():
            kept = [[] for _ in range(5000)]
        assert await turns() == 2, "no more than there were"
        with set_apart():
            kept += [[] for _ in range(5000)]
        assert await turns() == 3
        quiet = False
        monkeypatch.setattr(collector, "_LONGEST_S", 0.0)
        assert await turns() > 3
        collecting.cancel()
        await asyncio.wait((collecting,))
        assert gc.get_threshold() == usual
        assert len(kept) == 10_000

    monkeypatch.setattr(gc, "collect", collected)
    asyncio.run(go())


def test_a_pause_leaves_the_collector_as_it_was() -> None:
    with paused():
        assert not gc.isenabled()
        with paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        collect_at_times(patch)
    print("as it should be")
