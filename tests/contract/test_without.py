"""Extensions can be taken away."""

import pytest

from oscine.api import apis
from oscine.settings.config import Config
from tests.contract.without import extensions, failure, few_cases, without


def test_what_needs_a_missing_extension_is_missing_too() -> None:
    assert without(["replicas"]) == {"replicas", "cluster", "plan", "profile"}
    assert without(["tools"]) == {"tools"}
    assert without(["parallel"]) == {"parallel", "bench", "doctor", "eval", "plan", "profile", "verify"}
    assert len(extensions()) == 26


@pytest.mark.long
@pytest.mark.parametrize("case", few_cases(), ids="-".join)
def test_the_rest_works_without_it(case: list[str]) -> None:
    trace = failure(without(case))
    assert trace is None, trace


NEEDING = {  # what is absent with an API
    "responses": {"responses", "anthropic", "batches", "conventions", "conversations", "file_search", "websocket"},
    "batches": {"batches", "file_search"},
}


@pytest.mark.parametrize("gone", apis.APIS)
def test_an_api_is_absent_with_those_that_need_it(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = apis.is_there
    monkeypatch.setattr(apis, "is_there", lambda place: place != apis.APIS[gone] and there(place))
    found = apis.make_service(Config()).apis
    assert {*apis.APIS} - found.keys() == NEEDING.get(gone, {gone})
