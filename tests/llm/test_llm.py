"""The Python API with the embedded model: the examples of docs/python.md, then what they leave out, on one engine."""

import asyncio
import gc
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec
import psutil
import pytest

from oscine.checkpoint.hub import NANO_FOLDER
from oscine.llm import LLM, LostEngineError, RequestError
from oscine.llm.forms import response_format
from oscine.llm.functions import Function
from oscine.llm.options import read
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)
SUM = "What is 27 + 58?"


@pytest.fixture(scope="module")
def documented() -> Iterator[dict[str, Any]]:
    """The names that the examples have made so far. The first example makes `llm`."""
    names: dict[str, Any] = {"__name__": "documentation"}
    exec(BLOCKS[0], names)
    yield names
    names["llm"].close()


@pytest.fixture
def llm(documented: dict[str, Any]) -> LLM:
    found: LLM = documented["llm"]
    return found


def test_the_first_example_gives_the_right_answer(documented: dict[str, Any]) -> None:
    answer = documented["answer"]
    assert answer.content == "27 + 58 = 85."
    assert answer.finish_reason == "stop"
    assert "carry" in answer.reasoning
    assert answer.usage.completion_tokens == len(answer.choices[0].token_ids)


@pytest.mark.parametrize("block", [block for block in BLOCKS[1:] if "AsyncLLM" not in block])
def test_examples_run(documented: dict[str, Any], block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(block, documented)
    printed = capsys.readouterr().out
    for expected in re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE):
        assert expected in printed


def test_a_stream_says_what_the_whole_answer_says(llm: LLM) -> None:
    whole = llm.chat(SUM, temperature=0)
    events = [*llm.stream_chat(SUM, temperature=0)]
    pieces: dict[str, str] = {}
    for event in events[:-1]:
        pieces[event.type] = pieces.get(event.type, "") + getattr(event, "delta", "")
    assert pieces["response.output_text.delta"] == whole.content
    assert pieces["response.reasoning_text.delta"] == whole.reasoning
    assert events[-1].type == "response.completed"
    assert events[-1].result.choices == whole.choices


def test_a_function_is_called_with_its_types_and_its_result_is_read(llm: LLM) -> None:
    met: list[tuple[str, str]] = []

    def get_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> dict[str, int]:
        """Get the current weather in a city."""
        met.append((city, unit))
        return {"degrees": 18}

    kinds = [
        event.type for event in llm.stream_chat("What is the weather in Paris?", tools=[get_weather], temperature=0)
    ]
    assert met == [("Paris", "celsius")]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 1
    answer = llm.chat("What is the weather in Paris?", tools=[get_weather], run_functions=False, temperature=0)
    (call,) = answer.tool_calls
    assert (call.name, call.kwargs["city"], answer.finish_reason) == ("get_weather", "Paris", "tool_calls")
    assert len(met) == 1


def test_what_a_function_raises_ends_the_request(llm: LLM) -> None:
    def get_weather(city: str) -> str:
        """Get the current weather in a city."""
        raise LookupError(city)

    with pytest.raises(LookupError, match="Paris"):
        llm.chat("What is the weather in Paris?", tools=[get_weather], temperature=0)


def test_a_required_call_is_required_once_and_calls_are_bounded(llm: LLM) -> None:
    count = 0

    def get_weather(city: str) -> str:
        """Get the current weather in a city."""
        nonlocal count
        count += 1
        return "18 degrees"

    wish = {"tools": [get_weather], "tool_choice": "required", "temperature": 0, "max_tokens": 300}
    answer = llm.chat("What is the weather in Paris?", **wish)
    assert count >= 1
    assert answer.content
    count = 0
    assert llm.chat("What is the weather in Paris?", **wish, max_tool_calls=1).content
    assert count == 1


def test_wrong_parameters_are_named(llm: LLM) -> None:
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"temperature": 5}, "temperature", "at most 2"),
        ({"temprature": 1}, "temprature", "did you mean temperature"),
        ({"stream": True}, "stream", "no parameter"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"logit_bias": {10**6: 1}}, "logit_bias", "token ids"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools", "enabled"),
    ]
    for parameters, param, said in wrong:
        with pytest.raises(RequestError, match=said) as caught:
            llm.chat(SUM, **parameters)
        assert caught.value.param == param
    with pytest.raises(RequestError) as caught:
        llm.generate("one", max_tokens=10**6)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is" in str(caught.value)
    assert "prompt is too long" in str(caught.value)
    with pytest.raises(RequestError, match="messages"):
        llm.chat(5)  # type: ignore[call-overload]


def test_a_batch_ends_with_its_first_error_or_keeps_errors_in_place(llm: LLM) -> None:
    conversations = ["What is 1 + 2?", [{"role": "tool", "content": "x"}], "What is 2 + 2?"]
    first, error, last = llm.chat(conversations, temperature=0, return_exceptions=True)
    assert first.content == "1 + 2 = 3."
    assert last.content == "2 + 2 = 4."
    assert isinstance(error, RequestError)
    with pytest.raises(RequestError, match="tool") as caught:
        llm.chat(conversations, temperature=0)
    assert caught.value.__notes__ == ["at index 1 of the batch"]
    assert llm.chat([]) == []


def test_more_requests_than_the_engine_queues_wait_for_room(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (model,) = llm._llm._service.models
    monkeypatch.setattr(model.admission, "max_sequences", 3)
    answers = llm.chat(["Say hi."] * 8, n=2, max_tokens=3, seed=1)
    assert [len(answer.choices) for answer in answers] == [2] * 8
    assert model.admission.sequences == 0


def test_a_stream_that_is_left_ends_in_the_engine(llm: LLM) -> None:
    stream = llm.stream_generate("one", max_tokens=4000, ignore_eos=True)
    next(stream)
    stream.close()
    (model,) = llm._llm._service.models
    wait_until(lambda: model.admission.sequences == 0, "the end of the request")


def test_structured_answers_of_all_kinds(llm: LLM) -> None:
    class Sum(TypedDict):
        result: int

    closed = {"type": "object", "properties": {"result": {"enum": [4, 5]}}, "required": ["result"]}
    schema = {"type": "json_schema", "json_schema": {"name": "sum", "schema": closed | {"additionalProperties": False}}}
    assert llm.chat("What is 2 + 2? Answer in JSON.", response_format=Sum, temperature=0).parsed == {"result": 4}
    answer = llm.chat("What is 2 + 2? Answer in JSON.", response_format=schema, temperature=0)
    assert json.loads(answer.content or "") in ({"result": 4}, {"result": 5})
    assert llm.chat("Is 2 even?", regex="yes|no", temperature=0).content in ("yes", "no")
    assert llm.generate("Is 2 even?", guided_choice=["yes", "no"], temperature=0).text in ("yes", "no")


def test_unknown_options_are_named() -> None:
    for options, said in (
        ({"tensor_paralel_size": 2}, "no option 'tensor_paralel_size'; did you mean tensor_parallel_size"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"port": 80}, "port is an option of `oscine serve`"),
        ({"port_file": "port"}, "port_file is an option of `oscine serve`"),
        ({"tools": ["browser"]}, "tools browser needs"),
        ({"config": "x"}, "no option 'config'"),
    ):
        with pytest.raises(ValueError, match=said):
            read("oscine-nano", options, 0)
    config = read(ROOT, {"max_model_len": "32K", "profile": "max_throughput", "tools": ("python",), "seed": None}, 0)
    assert config.engine.model.max_model_len == 32768
    assert config.tools.tools == ("python",)


def test_functions_are_described_by_signature_and_docstring() -> None:
    class Point(msgspec.Struct):
        x: float

    def move(to: Point, *, steps: list[int] = [], anything=None) -> str:  # type: ignore[no-untyped-def]  # noqa: B006
        """Move there.

        Args:
            to (Point): where.
            steps: how.
        """
        return f"{to.x} {steps} {anything}"

    function = Function(move)
    described = function.tool["function"]
    assert described["description"] == "Move there."
    properties = described["parameters"]["properties"]
    assert properties["steps"] == {"type": "array", "items": {"type": "integer"}, "description": "how."}
    assert described["parameters"]["required"] == ["to"]
    assert asyncio.run(function.call('{"to": {"x": 1.5}, "anything": 3}')) == "1.5 [] 3"
    assert asyncio.run(function.call('{"to": 3}')).startswith("Error: Expected `object`")
    with pytest.raises(RequestError, match="by name"):
        Function(lambda *numbers: 1)


def test_a_class_of_pydantic_is_a_closed_schema() -> None:
    from pydantic import BaseModel

    class Inner(BaseModel):
        name: str

    class Outer(BaseModel):
        inner: Inner
        labels: dict[str, str] = {}

    form, parse = response_format(Outer)
    schema = form["json_schema"]["schema"]
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Inner"]["additionalProperties"] is False
    assert schema["properties"]["labels"]["additionalProperties"] == {"type": "string"}
    assert parse is not None
    assert parse('{"inner": {"name": "x"}}') == Outer(inner=Inner(name="x"))


def test_threads_share_a_model(llm: LLM) -> None:
    answers: dict[int, str | None] = {}

    def ask(i: int) -> None:
        answers[i] = llm.chat(f"What is {i} + 2?", temperature=0).content

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: f"{i} + 2 = {i + 2}." for i in range(4)}


@pytest.mark.slow
def test_an_async_function_cannot_wait_for_the_model_that_calls_it(llm: LLM) -> None:
    async def ask(question: str) -> str:
        """Ask another model a question."""
        return llm.chat(question).content or ""

    with pytest.raises(RuntimeError, match="cannot wait for this LLM"):
        llm.chat("Ask it.", tools=[ask], tool_choice="required", temperature=0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_was_forked_ends_and_has_no_model(llm: LLM) -> None:
    child = multiprocessing.get_context("fork").Process(target=forked, args=(llm,))
    child.start()
    child.join(20.0)
    exitcode = child.exitcode
    child.kill()
    assert exitcode == 0
    assert llm.chat("What is 2 + 2?", temperature=0).content == "2 + 2 = 4."


def forked(llm: LLM) -> None:
    with pytest.raises(LostEngineError, match="closed"):
        llm.chat(SUM)
    llm.close()


@pytest.mark.slow
def test_a_lost_engine_is_an_error_and_the_next_request_waits_for_another(llm: LLM) -> None:
    """Last but one on this engine."""
    (model,) = llm._llm._service.models
    stream = llm.stream_generate("one", max_tokens=4000, ignore_eos=True)
    next(stream)
    os.kill(model.engine.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(LostEngineError, match="The engine failed"):
        list(stream)
    assert llm.chat("What is 2 + 2?", temperature=0).content == "2 + 2 = 4."


def test_a_closed_model_says_so(llm: LLM) -> None:
    """Last on this engine."""
    (model,) = llm._llm._service.models
    engine = psutil.Process(model.engine.pid)  # type: ignore[attr-defined]
    llm.close()
    assert not engine.is_running()
    for _ in range(2):
        with pytest.raises(LostEngineError, match="closed"):
            llm.chat(SUM)
    llm.close()


def test_random_weights_answer_on_a_cpu() -> None:
    with LLM(random_weights=NANO_FOLDER / "config.json", device="cpu") as llm:
        answer = llm.chat(SUM, max_tokens=4, ignore_eos=True)  # any token may be drawn, one that ends an answer, too
    assert answer.usage.completion_tokens == 4
    assert answer.finish_reason == "length"


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in BLOCKS if "AsyncLLM" in block])
def test_examples_of_async_run(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(block, {"__name__": "documentation"})
    assert "2 + 2 = 4. 3 + 4 = 7." in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        LLM(tmp_path)


SCRIPT = """
from oscine import LLM
llm = LLM()
(model,) = llm._llm._service.models
print(model.engine.pid, flush=True)
print(llm.chat("What is 27 + 58?", temperature=0).content, flush=True)
"""


@pytest.mark.slow
def test_a_script_needs_no_guard_and_leaves_no_engine(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=120)
    pid, answer = done.stdout.split("\n", 1)
    assert (answer, done.stderr) == ("27 + 58 = 85.\n", "")
    assert not psutil.pid_exists(int(pid))


@pytest.mark.slow  # each starts a process that loads the model
@pytest.mark.parametrize(
    "work", ["llm.generate('one', max_tokens=100000)", "llm.chat(['Tell me a story.'] * 1000, progress=False)"]
)
def test_an_interrupt_stops_a_script_cleanly(tmp_path: Path, work: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("max_tokens=100000", "max_tokens=3000") + f"{work.replace('100000', '3000')}\n")
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.stdout.readline()
    engine = psutil.Process(pid)
    before_s = engine.cpu_times().user
    wait_until(lambda: engine.cpu_times().user > before_s + 0.2, "an engine at work")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate(timeout=30)
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert said.count("Traceback") == 1
    assert not psutil.pid_exists(pid)


@pytest.mark.slow
def test_a_model_that_the_garbage_collector_finds_ends_its_engine() -> None:
    llm = LLM()
    thread, (model,) = llm._thread, llm._llm._service.models
    engine = psutil.Process(model.engine.pid)  # type: ignore[attr-defined]
    cycle: list[Any] = [llm]
    cycle.append(cycle)
    del llm, model, cycle
    thread.loop.call_soon_threadsafe(gc.collect)  # in the thread that the end of the engine needs
    wait_until(lambda: not engine.is_running(), "the end of the engine")


@pytest.mark.slow
def test_a_running_event_loop_is_not_in_the_way() -> None:
    """As in a notebook."""

    async def cell() -> str | None:
        with LLM() as llm:
            return llm.chat(SUM, temperature=0).content

    assert asyncio.run(cell()) == "27 + 58 = 85."
