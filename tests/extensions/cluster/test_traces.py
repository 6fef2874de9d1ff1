"""One trace follows a request through router, prefill, transfer and decode, and from a lost engine to the next."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from oscine.api.apis import make_service
from oscine.api.app import create_app
from oscine.extensions.replicas.client.engine import ClusterEngine
from oscine.extensions.replicas.spec.placement import Place, Placement
from oscine.settings.config import Config, EngineOptions, ModelOptions, ServerOptions
from oscine.types import PrefillSource, RemotePrefill
from tests.api.otlp_receiver import OtlpReceiver, attributes
from tests.extensions.cluster.local_placer import ScriptedPlacer
from tests.extensions.cluster.raw_engine import RawEngine

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SOURCE = PrefillSource("p", "tcp://127.0.0.1:9", 100, 1.0)
MS = 1_000_000


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Any:
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        yield receiver


def traced(folder: Path, answer: Callable[[Placement], Place], play: Callable[[], Any]) -> httpx.Response:
    """The answer to one completion, with the engines played meanwhile; all spans are exported then."""

    async def test() -> httpx.Response:
        service = make_service(Config(server=ServerOptions(traces="http/protobuf")))
        engine = ClusterEngine(ScriptedPlacer(answer), "model", prefix_seed="5eed")
        service.add(engine, EngineOptions(model=ModelOptions(model=str(folder))), ["model"])
        await service.start()
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as client:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            body = {"model": "model", "prompt": "abc", "max_tokens": 20}
            response, _ = await asyncio.gather(client.post("/v1/completions", json=body, headers=headers), play())
        await service.stop()
        return response

    return asyncio.run(test())


def test_a_trace_of_a_request_that_was_prefilled_elsewhere_and_moved(
    receiver: OtlpReceiver, model_folder: Path
) -> None:
    with RawEngine("a") as a, RawEngine("b") as b:

        def answer(placement: Placement) -> Place:
            if "a" in placement.exclude:
                return b.place()
            return dataclasses.replace(a.place(SOURCE), num_overlap_tokens=64, queue_s=0.5)

        async def play() -> None:
            asked = await a.request()
            await asyncio.sleep(0.05)  # computing and fetching take 0.04 s of it; a longer wait changes nothing
            moved = RemotePrefill("p", 0.03, 0.01, 3, 2, 1000)
            await a.answer(asked, [65], queue_s=0.045, prefill=moved)
            await a.answer(asked, [66, 67])
            a.end()
            asked = await b.request()
            assert asked.generated_token_ids == [65, 66, 67]
            await b.answer(asked, [68], finish_reason="length")

        response = traced(model_folder, answer, play)
    assert response.json()["choices"][0]["text"] == "ABCD"
    spans = [span for span in receiver.spans if span.trace_id == bytes.fromhex(TRACE)]
    (root,) = (span for span in spans if span.parent_span_id == bytes.fromhex(PARENT))

    def below(parent: Any) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for span in sorted(spans, key=lambda span: span.start_time_unix_nano):
            if span.parent_span_id == parent.span_id:
                found.setdefault(span.name, []).append(span)
                assert attributes(span)["gen_ai.request.model"] == "model"
                assert parent.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
                assert span.end_time_unix_nano <= parent.end_time_unix_nano
        return found

    found = below(root)
    assert {name: len(of) for name, of in found.items()} == {
        **{"queue": 1, "prefill": 1, "decode": 1, "route": 2, "engine": 2, "migration": 1}
    }
    routed = attributes(found["route"][0])
    assert (routed["oscine.replica"], routed["oscine.router.overlap_tokens"]) == ("a", 64)
    assert routed["oscine.router.queue_s"] == 0.5
    said = [(attributes(e)["oscine.replica"], attributes(e)["gen_ai.usage.output_tokens"]) for e in found["engine"]]
    assert said == [("a", 3), ("b", 1)]

    first, second = found["engine"]
    assert found["route"][0].end_time_unix_nano <= first.start_time_unix_nano
    steps = below(first)
    (computed,), (fetched,) = steps["remote_prefill"], steps["kv_transfer"]
    assert attributes(computed)["oscine.replica"] == attributes(fetched)["oscine.replica"] == "p"
    assert attributes(fetched)["oscine.transfer.bytes"] == 1000
    assert computed.end_time_unix_nano - computed.start_time_unix_nano == pytest.approx(30 * MS, abs=MS)
    assert fetched.end_time_unix_nano - fetched.start_time_unix_nano == pytest.approx(10 * MS, abs=MS)
    assert fetched.start_time_unix_nano == computed.end_time_unix_nano

    (move,) = found["migration"]
    assert attributes(move)["oscine.replica.from"] == "a"
    assert attributes(move)["oscine.replica.to"] == "b"
    assert attributes(move)["oscine.known_tokens"] == 3
    assert move.start_time_unix_nano == first.end_time_unix_nano
    assert second.start_time_unix_nano <= move.end_time_unix_nano <= second.end_time_unix_nano


def test_a_prompt_that_was_computed_here_after_all(receiver: OtlpReceiver, model_folder: Path) -> None:
    with RawEngine("a") as a:

        async def play() -> None:
            asked = await a.request()
            failed = RemotePrefill("p", failure="it took longer than 1 s")
            await a.answer(asked, [65], finish_reason="length", prefill=failed)

        assert traced(model_folder, lambda placement: a.place(SOURCE), play).status_code == 200
    (tried,) = (span for span in receiver.spans if span.name == "remote_prefill")
    assert tried.status.code == tried.status.STATUS_CODE_ERROR
    assert tried.status.message == "it took longer than 1 s"
    assert not [span for span in receiver.spans if span.name in ("kv_transfer", "migration")]
