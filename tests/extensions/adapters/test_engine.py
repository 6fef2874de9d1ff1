"""Many adapters and few places in an engine's loop, over a tiny model."""

import asyncio
import gc
import random
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest

from oscine.engine.core.prefix_index import salted
from oscine.engine.process.adapters import ClientAdapters
from oscine.engine.wire.messages import AdapterNews, LoadAdapter, UnloadAdapter
from oscine.extensions.adapters.policy import RuntimeAdapters
from oscine.settings.adapters import AdapterOptions
from oscine.settings.option import OptionError
from oscine.types import AdapterInfo, GenerationOutput, GenerationRequest, SamplingParams
from tests.executor.tiny import PAGE, executor, loop, memory, options, prompt
from tests.model.tiny import model, tensors
from tests.tiny import TINY
from tests.waiting import wait_until

from .adapters import ATTENTION, EXPERTS, random_adapter, write_peft
from .test_merged import adapters_of

NUM_ADAPTERS, PLACES = 100, 8
base = model(TINY, tensors(TINY))


class Engine:
    """With adapters that come by commands."""

    def __init__(self, places: int = PLACES, **more: Any) -> None:
        asked = options(max_num_seqs=12, max_num_batched_tokens=96)
        self.device = adapters_of(base, [], slots=places)
        runner = executor(base, asked, 128, 128)
        runner = type(runner)(base, memory(128, 128), runner.kv, 12, adapters=self.device)
        self.policy = RuntimeAdapters(self.device.host, AdapterOptions(True, max_loras=places, **more))
        self.loop = loop(runner, asked, runner.memory, self.policy)
        self.said: dict[str, list[int]] = {}
        self.errors: dict[str, str] = {}

    def load(self, name: str, folder: Path) -> AdapterNews:
        return self.finish(LoadAdapter(name, str(folder)))

    def finish(self, command: LoadAdapter) -> AdapterNews:
        news: list[AdapterNews] = []
        assert self.policy.command(command, news.append)
        wait_until(lambda: bool(self.step() or news), "an adapter")
        return news[0]

    def add(self, name: str, tokens: list[int], adapter: str, max_tokens: int = 6) -> None:
        self.loop.add(GenerationRequest(name, tokens, SamplingParams(max_tokens, temperature=0.0), adapter=adapter))

    def step(self) -> None:
        for output in self.loop.step():
            self._take(output)

    def _take(self, output: GenerationOutput) -> None:
        self.said.setdefault(output.request_id, []).extend(output.token_ids)
        if output.error is not None:
            self.errors[output.request_id] = output.error

    def run(self) -> None:
        while self.loop.has_work:
            self.step()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    parts = (ATTENTION, (*ATTENTION, *EXPERTS))
    made = (random_adapter(TINY, parts[i % 2], rank=1 + i % 8, seed=i, size=2.0) for i in range(NUM_ADAPTERS))
    return [write_peft(folder / str(i), adapter) for i, adapter in enumerate(made)]


def test_a_hundred_adapters_share_eight_places(folders: list[Path]) -> None:
    """In any order, with prefixes in common; each says what it says alone. Then nothing is left of them."""
    chosen, engine = random.Random(0), Engine()
    identities = [news.info.identity for i, folder in enumerate(folders) if (news := engine.load(str(i), folder)).info]
    assert len(set(identities)) == NUM_ADAPTERS
    asked = [(chosen.randrange(NUM_ADAPTERS + 1), prompt(PAGE + 3 + i % 5, start=i % 3)) for i in range(80)]
    for i, (adapter, tokens) in enumerate(asked):
        engine.add(str(i), tokens, "" if adapter == NUM_ADAPTERS else identities[adapter])
        if not chosen.randrange(4):
            engine.step()
    engine.run()
    assert not engine.errors
    for i in chosen.sample(range(len(asked)), 8):
        adapter, tokens = asked[i]
        alone = Engine(places=1)
        identity = ""
        if adapter < NUM_ADAPTERS:
            found = alone.load("x", folders[adapter]).info
            assert found is not None
            identity = found.identity
        alone.add("x", tokens, identity)
        alone.run()
        assert engine.said[str(i)] == alone.said["x"]
    left = [weakref.ref(engine.device.host.get(number).pieces[0]) for number in range(NUM_ADAPTERS)]
    for identity in identities:
        engine.policy.command(UnloadAdapter(identity), lambda news: None)
    stats = engine.loop.stats()
    assert (stats.adapters_loaded, stats.adapters_running, stats.adapters_waiting) == (0, 0, 0)
    engine.add("last", prompt(5), "")
    engine.run()
    gc.collect()
    assert not any(one() for one in left)


def test_an_adapter_goes_when_its_last_request_has_ended(folders: list[Path]) -> None:
    engine = Engine(places=1)
    first, second = (engine.load(str(i), folders[i]).info for i in range(2))
    assert first is not None
    assert second is not None
    engine.add("a", prompt(20), first.identity, max_tokens=12)
    engine.step()
    engine.add("waits", prompt(20), second.identity)
    engine.policy.command(UnloadAdapter(first.identity), lambda news: None)
    engine.add("b", prompt(9), first.identity, max_tokens=3)  # until it is gone it can be asked for
    assert engine.loop.stats().adapters_waiting == 1  # b has overtaken it
    engine.loop.cancel("b")
    engine.run()
    assert len(engine.said["a"]) == 12
    assert len(engine.said["waits"]) == 6
    assert engine.loop.stats().adapters_loaded == 1
    engine.add("late", prompt(5), first.identity)
    engine.run()
    assert engine.errors == {"late": "the LoRA adapter of this request is not loaded"}


def test_equal_contents_are_one_adapter(folders: list[Path], tmp_path: Path) -> None:
    engine = Engine()
    copy = write_peft(tmp_path / "copy", random_adapter(TINY, ATTENTION, rank=1, seed=0, size=2.0))
    first, second = engine.load("a", folders[0]).info, engine.load("b", copy).info
    assert first is not None
    assert second is not None
    assert first.identity == second.identity
    assert (second.name, second.path) == ("b", str(copy))
    assert engine.loop.stats().adapters_loaded == 1


def test_more_adapters_than_host_memory_may_have_are_refused(folders: list[Path]) -> None:
    engine = Engine(places=1, max_cpu_loras=1)
    assert engine.load("a", folders[0]).info is not None
    assert engine.load("b", folders[1]).error == "1 adapters are loaded, as many as --max-cpu-loras allows"


def test_prefixes_of_adapters_have_roots_of_their_own() -> None:
    root = bytes(16)
    roots = [salted(root, salt, adapter) for salt in ("", "a", "b") for adapter in ("", "a", "b")]
    assert len(set(roots)) == 9
    assert roots[0] == root


def test_values_of_options_are_checked() -> None:
    text = '{"name": "sql", "path": "/adapters/sql"}'
    assert AdapterOptions(True, (text, "b=x=y")).modules == [("sql", "/adapters/sql"), ("b", "x=y")]
    for wrong in ("sql", "=x", "sql=", "{", '{"name": 1, "path": "x"}'):
        with pytest.raises(OptionError, match="NAME=FOLDER"):
            AdapterOptions(True, (wrong,))
    with pytest.raises(OptionError, match="at least --max-loras"):
        AdapterOptions(True, max_loras=4, max_cpu_loras=3)


def test_an_adapter_stays_that_was_named_again_before_it_was_unloaded(folders: list[Path], tmp_path: Path) -> None:
    """The client unloads one, and has not heard yet that another one has the same contents."""
    engine, commands = Engine(), list[Any]()
    same = shutil.copytree(folders[0], tmp_path / "same")

    async def session() -> None:
        client = ClientAdapters(commands.append)

        async def load(name: str, folder: Path) -> tuple["asyncio.Task[AdapterInfo]", AdapterNews]:
            loading = asyncio.create_task(client.load(name, str(folder)))
            await asyncio.sleep(0)
            return loading, engine.finish(commands.pop())

        loading, news = await load("a", folders[0])
        client.hear(news)
        identity = (await loading).identity
        loading, news = await load("b", same)
        client.forget("a")
        client.drop(identity)
        engine.policy.command(commands.pop(), lambda news: None)
        client.hear(news)
        assert (await loading).identity == identity
        assert engine.loop.stats().adapters_loaded == 1
        client.forget("b")
        client.drop(identity)
        engine.policy.command(commands.pop(), lambda news: None)
        assert engine.loop.stats().adapters_loaded == 0

    asyncio.run(session())
