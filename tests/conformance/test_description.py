"""The server behaves as its own /openapi.json says, for any request: no 5xx, and no undescribed answer."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server import ServerProcess

REQUIRED = {"messages", "prompt", "input", "tokens", "max_tokens", "input_file_id", "endpoint", "completion_window"}
LIKE_OTHERS = {"/v2/models/{name}/generate_stream", "/v2/health/live", "/v2/health/ready", "/ping", "/v1/metrics"}
CHECKS: list[Any] = [
    *(not_a_server_error, status_code_conformance, content_type_conformance),
    *(response_headers_conformance, response_schema_conformance),
]


class Things:
    """What exists on the server. A case may have deleted a response or a file: a new one takes its place."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.model = server.model()
        self._response = self._file = self._store = self._conversation = ""

    def response(self) -> str:
        if not self._exists(f"/v1/responses/{self._response}"):
            self._response = self._server.post("/v1/responses", {"input": "hi"})["id"]
        return self._response

    def file(self) -> str:
        if not self._exists(f"/v1/files/{self._file}"):
            form: dict[str, Any] = {"files": {"file": b"{}"}, "data": {"purpose": "batch"}}
            self._file = httpx.post(f"{self._server.url}/v1/files", **form).json()["id"]
        return self._file

    def store(self) -> str:
        """A vector store with the file."""
        if not self._exists(f"/v1/vector_stores/{self._store}/files/{self.file()}"):
            self._store = self._server.post("/v1/vector_stores", {"file_ids": [self.file()]})["id"]
        return self._store

    def conversation(self) -> str:
        if not self._exists(f"/v1/conversations/{self._conversation}"):
            self._conversation = self._server.post("/v1/conversations", {})["id"]
        return self._conversation

    def item(self) -> str:
        path = f"/v1/conversations/{self.conversation()}/items"
        return str(self._server.post(path, {"items": [{"role": "user", "content": "hi"}]})["first_id"])

    def batch(self) -> str:
        path = f"/v1/vector_stores/{self.store()}/file_batches"
        return str(self._server.post(path, {"file_ids": [self.file()]})["id"])

    def _exists(self, path: str) -> bool:
        return not path.endswith("/") and httpx.get(self._server.url + path).status_code == 200


class Prober:
    """Sends cases of one operation and counts the statuses of the answers."""

    def __init__(self, things: Things, operation: Any) -> None:
        self.things, self.operation = things, operation
        self.statuses: Counter[int] = Counter()

    def send(self, case: Any, checks: list[Any]) -> None:
        response = case.call(timeout=60)
        self.statuses[response.status_code] += 1
        case.validate_response(response, checks=checks)

    def send_valid(self, case: Any, data: st.DataObject) -> None:
        """Of a random body a random part, about things that exist: all of it at once is always refused."""
        if isinstance(case.body, dict):
            optional = sorted(case.body.keys() - REQUIRED)
            kept = REQUIRED | data.draw(st.sets(st.sampled_from(optional), max_size=3) if optional else st.just(set()))
            case.body = {name: value for name, value in case.body.items() if name in kept}
        if data.draw(st.booleans()):
            self._name_what_exists(case)
        self.send(case, CHECKS)

    def send_example(self, case: Any) -> None:
        self._name_what_exists(case)
        self.send(case, CHECKS)

    def _name_what_exists(self, case: Any) -> None:
        things = self.things
        ids = {"/v1/vector_stores": things.store, "/v1/conversations": things.conversation}
        of_path = next((make for path, make in ids.items() if case.path.startswith(path)), things.response)
        known = {"id": of_path, "name": lambda: things.model}
        known |= {"file_id": things.file, "batch_id": things.batch, "item_id": things.item}
        case.path_parameters = {name: known[name]() for name in case.path_parameters or {}}
        if isinstance(case.body, dict):
            case.body["model"] = things.model
            case.body |= {name: things.file() for name in ("input_file_id", "file_id") if name in case.body}
            case.body |= {"file_ids": [things.file()]} if "file_ids" in case.body else {}


def bounded(examples: int) -> Any:
    health = list(HealthCheck)
    return settings(max_examples=examples, derandomize=True, database=None, suppress_health_check=health)


def check_valid(prober: Prober, examples: int) -> None:
    cases = prober.operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    run = bounded(examples)(given(cases, st.data())(lambda case, data: prober.send_valid(case, data)))
    run()


def check_invalid(prober: Prober, examples: int) -> None:
    if not prober.operation.body and not prober.operation.query:
        return  # a name or id in the path may be any text
    cases = prober.operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    checked = [*CHECKS, negative_data_rejection]
    run = bounded(-(-examples // 2))(given(cases)(lambda case: prober.send(case, checked)))
    run()


def check_examples(prober: Prober, _: int) -> None:
    """The document's own examples are answered."""
    for cases in prober.operation.get_strategies_from_examples():
        run = settings(max_examples=1, database=None)(given(cases)(lambda case: prober.send_example(case)))
        run()
        assert prober.statuses[200], prober.statuses


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[ServerProcess]:
    """Answers at once."""
    with ServerProcess(str(model_folder), "--executor", "fake", "--log-level", "error") as server:
        yield server


@pytest.mark.filterwarnings("ignore")  # those of the tool itself
@pytest.mark.parametrize("examples", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_the_server_keeps_to_its_description(server: ServerProcess, examples: int, subtests: pytest.Subtests) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 18
    things = Things(server)
    for operation in (one for one in operations if one.path not in LIKE_OTHERS):
        has_examples = not operation.path.endswith("lora_adapter")  # this server takes none
        for check in (*([check_examples] if has_examples else []), check_valid, check_invalid):
            with subtests.test(operation.label, check=check.__name__):
                check(Prober(things, operation), examples)
