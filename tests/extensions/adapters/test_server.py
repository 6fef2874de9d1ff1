"""Adapters of the embedded model in a real server, and in the Python API."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from oscine.checkpoint.hub import NANO_FOLDER, config_at
from oscine.extensions.adapters.start import targets_of_modules
from oscine.llm import LLM, LostEngineError
from oscine.model.tensors import tensor_specs
from oscine.settings.adapters import NamedAdapter
from oscine.settings.option import OptionError
from tests.server import ServerProcess
from tests.waiting import DEADLINE_S, wait_until

from .adapters import ATTENTION, EXPERTS, random_adapter, write_peft

BASE = "oscine-nano"
NAMES = ("a", "b", "c")
TEXT = "What is 27 + 58? Let us count"
ADMIN = {"Authorization": "Bearer admin"}
USER = {"Authorization": "Bearer user"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of which each changes what the model says."""
    folder, config = tmp_path_factory.mktemp("adapters"), config_at(NANO_FOLDER)
    parts = {"a": ATTENTION, "b": (*ATTENTION, "router", *EXPERTS), "c": EXPERTS}
    made = {name: random_adapter(config, parts[name], seed=i, size=1.2) for i, name in enumerate(NAMES)}
    return {name: write_peft(folder / name, adapter) for name, adapter in made.items()}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[ServerProcess]:
    """With places for two adapters, and two that are there from the start."""
    modules = [f"{name}={folders[name]}" for name in ("a", "b")]
    keys = ("--api-key", "user", "--admin-key", "admin", "--log-level", "warning")
    options = ("--enable-lora", "--max-loras", "2", "--lora-modules", *modules)
    with ServerProcess(*options, *keys, "--max-num-seqs", "8", "--threads", "1") as process:
        yield process  # type: ignore[misc]


def send(server: ServerProcess, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        text = response.read().decode()
    return json.loads(text) if text.startswith("{") else text


def refused(server: ServerProcess, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        send(server, path, body, headers)
    return caught.value.code, str(json.load(caught.value)["error"]["message"])


@dataclass(frozen=True)
class Said:
    """An answer. Steps of other sizes round otherwise, so answers of one model are alike: they begin alike."""

    count: int
    first: int
    logprob: float  # of the first token

    def __eq__(self, other: object) -> bool:
        alike = isinstance(other, Said) and (self.count, self.first) == (other.count, other.first)
        return alike and abs(self.logprob - other.logprob) < 0.02  # type: ignore[union-attr]

    __hash__ = None  # type: ignore[assignment]


def says(server: ServerProcess, model: str, count: int = 4) -> Said:
    body = {"model": model, "prompt": TEXT, "max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    (choice,) = send(server, "/v1/completions", {**body, "return_token_ids": True}, USER)["choices"]
    return Said(len(choice["token_ids"]), choice["token_ids"][0], choice["logprobs"]["token_logprobs"][0])


def test_adapters_are_models_with_a_parent(server: ServerProcess, folders: dict[str, Path]) -> None:
    cards = {card["id"]: card for card in send(server, "/v1/models", None, USER)["data"]}
    assert list(cards) == [BASE, "a", "b"]
    assert cards["a"]["parent"] == BASE
    assert cards["a"]["root"] == str(folders["a"])
    assert cards[BASE]["parent"] is None
    assert send(server, "/v1/models/b", None, USER)["parent"] == BASE


def test_each_adapter_answers_alone_as_in_a_batch(server: ServerProcess) -> None:
    """The prefix cache keeps them apart, and so do the rows of a step."""
    models = (BASE, "a", "b")
    base, first, second = alone = [says(server, model) for model in models]
    assert base != first != second != base
    assert [says(server, model) for model in models] == alone
    assert say_at_once(server, models * 2, 4) == alone * 2


def say_at_once(server: ServerProcess, models: tuple[str, ...], count: int) -> list[Said]:
    with ThreadPoolExecutor(len(models)) as threads:
        return [*threads.map(lambda model: says(server, model, count), models)]


def test_adapters_come_and_go_while_others_answer(server: ServerProcess, folders: dict[str, Path]) -> None:
    """With three adapters and two places. An unloaded adapter serves the requests that have it."""
    models = (BASE, "a", "b") * 2
    alone = [replace(says(server, model), count=60) for model in models]
    with ThreadPoolExecutor(1) as thread:
        streams = thread.submit(say_at_once, server, models, 60)
        wait_until(lambda: server.metric("oscine:lora_adapters_used") == 2, "both adapters at work")
        send(server, "/v1/load_lora_adapter", {"lora_name": "c", "lora_path": str(folders["c"])}, ADMIN)
        waiting = thread_of(lambda: says(server, "c"))
        send(server, "/v1/unload_lora_adapter", {"lora_name": "a"}, ADMIN)
        assert refused(server, "/v1/completions", {"model": "a", "prompt": "x"}, USER)[0] == 404
        assert streams.result(DEADLINE_S) == alone
        assert waiting.result(DEADLINE_S) not in [replace(one, count=4) for one in alone]
    send(server, "/v1/unload_lora_adapter", {"lora_name": "c"}, ADMIN)
    wait_until(lambda: server.metric("oscine:lora_adapters") == 1, "the memory of two adapters to be free")
    send(server, "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": str(folders["a"])}, ADMIN)
    assert says(server, "a", 60) == alone[1]


def thread_of(work: Callable[[], Said]) -> "Future[Said]":
    threads = ThreadPoolExecutor(1)
    future = threads.submit(work)
    threads.shutdown(wait=False)
    return future


def test_a_name_can_get_another_adapter(server: ServerProcess, folders: dict[str, Path]) -> None:
    body = {"lora_name": "d", "lora_path": str(folders["c"])}
    send(server, "/v1/load_lora_adapter", body, ADMIN)
    first = says(server, "d")
    again = body | {"lora_path": str(folders["b"])}
    assert refused(server, "/v1/load_lora_adapter", again, ADMIN) == (
        400,
        "Invalid value for 'lora_name': there is an adapter 'd' already; `load_inplace` replaces it.",
    )
    send(server, "/v1/load_lora_adapter", again | {"load_inplace": True}, ADMIN)
    assert says(server, "d") == says(server, "b")
    assert says(server, "d") != first
    send(server, "/v1/unload_lora_adapter", {"lora_name": "d"}, ADMIN)
    assert says(server, "b") != first  # which has the same contents


def test_changes_need_the_right_to_change_models(server: ServerProcess, folders: dict[str, Path]) -> None:
    body = {"lora_name": "x", "lora_path": str(folders["c"])}
    assert refused(server, "/v1/load_lora_adapter", body, USER)[0] == 403
    assert refused(server, "/v1/unload_lora_adapter", {"lora_name": "b"}, USER)[0] == 403
    assert refused(server, "/v1/load_lora_adapter", body, {})[0] == 401
    assert says(server, "b")


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("x", "{folder}/missing", "is no folder"),
        ("x", "{folder}", "has no adapter_config.json"),
        (BASE, "{folder}/a", f"'{BASE}' is a model of this server"),
        ("b", "{folder}/a", "there is an adapter 'b' already"),
        ("x", "{folder}/high", "it has rank 17, and --max-lora-rank is 16"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(
    server: ServerProcess, folders: dict[str, Path], name: str, path: str, message: str
) -> None:
    folder = folders["a"].parent
    config = config_at(NANO_FOLDER)
    write_peft(folder / "high", random_adapter(config, ("q_proj",), rank=17))
    body = {"lora_name": name, "lora_path": path.format(folder=folder)}
    status, said = refused(server, "/v1/load_lora_adapter", body, ADMIN)
    assert status == 400
    assert message in said
    assert "\n" not in said


@pytest.mark.slow
def test_a_restarted_engine_has_its_adapters_again(server: ServerProcess, folders: dict[str, Path]) -> None:
    send(server, "/v1/load_lora_adapter", {"lora_name": "late", "lora_path": str(folders["c"])}, ADMIN)
    before = {model: says(server, model) for model in ("b", "late")}
    pid = server.engine.pid
    server.engine.kill()
    wait_until(lambda: _is_back(server, pid), "another engine")
    wait_until(lambda: server.metric("oscine:lora_adapters") >= 2, "its adapters")
    assert {model: says(server, model) for model in before} == before


def _is_back(server: ServerProcess, pid: int) -> bool:
    if [engine.pid for engine in server._engines()] in ([], [pid]):
        return False
    try:
        send(server, "/v1/health/ready", None, {})
    except urllib.error.HTTPError:
        return False
    return True


@pytest.mark.slow
def test_python_has_adapters_too(folders: dict[str, Path]) -> None:
    with LLM(enable_lora=True, lora_target_modules=["attention", "experts", "router"], threads=1) as llm:
        plain = llm.generate(TEXT, max_tokens=8, temperature=0).choices[0].token_ids
        llm.load_adapter("b", folders["b"])
        assert llm.generate(TEXT, max_tokens=8, temperature=0, model="b").choices[0].token_ids != plain
        assert llm.generate(TEXT, max_tokens=8, temperature=0).choices[0].token_ids == plain
        llm.unload_adapter("b")
        with pytest.raises(ValueError, match="there is no LoRA adapter 'b'"):
            llm.unload_adapter("b")
        with pytest.raises(ValueError, match="is no folder"):
            llm.load_adapter("b", folders["b"] / "missing")


def test_a_module_of_the_start_that_cannot_be_read_is_named(folders: dict[str, Path]) -> None:
    specs, nowhere = tensor_specs(config_at(NANO_FOLDER)), folders["a"] / "missing"
    with pytest.raises(OptionError, match=f"^--lora-modules sql: {nowhere} is no folder$"):
        targets_of_modules([NamedAdapter("sql", str(nowhere))], specs)
    with pytest.raises(OptionError, match=r"^--lora-modules sql: .* has no adapter_config\.json"):
        targets_of_modules([NamedAdapter("sql", str(nowhere.parents[1]))], specs)
    assert targets_of_modules([NamedAdapter("c", str(folders["c"]))], specs) == ("experts",)


def test_options_that_do_not_go_together_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="lora_modules needs --enable-lora"):
        LLM(lora_modules=[f"a={folders['a']}"])
    with pytest.raises(ValueError, match="lora_modules has 'a' twice"):
        LLM(enable_lora=True, lora_modules=[f"a={folders['a']}", f"a={folders['b']}"])
    with pytest.raises(
        LostEngineError,
        match=r"--lora-modules c: .*it changes the experts, which needs --lora-target-modules attention experts",
    ):
        LLM(enable_lora=True, lora_modules=[f"c={folders['c']}"], lora_target_modules=["attention"])
