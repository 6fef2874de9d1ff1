"""The content of /metrics, and that its numbers are consistent."""

import time
from itertools import product
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from oscine.api.telemetry.sequence_metrics import HISTOGRAMS, SequenceFamilies
from oscine.engine.wire.stream import EngineDied, EngineError
from oscine.types import EngineStats, GenerationOutput, GenerationRequest
from tests.api.scripted_server import ScriptedServer
from tests.server import ServerProcess
from tests.waiting import wait_until

DASHBOARD_NAMES = [
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total"),
    *("prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total", "num_preemptions_total"),
    *("time_to_first_token_seconds_count", "inter_token_latency_seconds_sum", "e2e_request_latency_seconds_bucket"),
    *("request_queue_time_seconds_count", "request_prefill_time_seconds_count", "request_decode_time_seconds_count"),
    *("request_success_total", "request_max_num_generation_tokens_sum"),
    *("prompt_tokens_cached_total", "num_requests_waiting_by_reason", "engine_sleep_state", "cache_config_info"),
    *("request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_params_max_tokens_bucket"),
    *("request_params_n_bucket", "request_inference_time_seconds_sum", "request_prefill_kv_computed_tokens_sum"),
    *("request_time_per_output_token_seconds_bucket", "prompt_tokens_by_source_total"),
    "tool_call_parser_invocations_total",
]
OLDER_NAMES = {
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "time_per_output_token_seconds_bucket": "inter_token_latency_seconds_bucket",
}

USER = [{"role": "user", "content": "x"}]
ADD = {"name": "add", "parameters": {"type": "object"}}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(found: Samples, name: str, **labels: str) -> float:
    return sum(value for (own, given), value in found.items() if own == name and labels.items() <= dict(given).items())


def scrape(server: ScriptedServer) -> Samples:
    return samples(server.get("/metrics").text)


def test_the_names_dashboards_know(scripted: ScriptedServer) -> None:
    scripted.chat()
    found = scrape(scripted)
    names = {name for name, _ in found}
    for name in DASHBOARD_NAMES:
        assert f"oscine:{name}" in names
        own = {labels: value for (known, labels), value in found.items() if known == f"oscine:{name}"}
        alias = {labels: value for (known, labels), value in found.items() if known == f"vllm:{name}"}
        assert alias == {labels | {("engine", "0")}: value for labels, value in own.items()}
    for older, name in OLDER_NAMES.items():
        assert total(found, f"vllm:{older}") == total(found, f"vllm:{name}")
        assert f"vllm:{older}" in names


PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
PROMETHEUS_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3"
UNDERSCORES = "text/plain;version=1.0.0;escaping=underscores"


@pytest.mark.parametrize("accept", [PROMETHEUS_2, PROMETHEUS_3, UNDERSCORES, "text/plain", "*/*", ""])
def test_names_are_the_same_in_each_format(scripted: ScriptedServer, accept: str) -> None:
    answer = scripted.get("/metrics", {"Accept": accept})
    assert "\noscine:num_requests_running{" in answer.text
    assert ("# EOF" in answer.text) == answer.headers["Content-Type"].startswith("application/openmetrics-text")


def test_requests_are_counted_by_how_they_end(scripted: ScriptedServer) -> None:
    scripted.says("hello", size=1, finish="length")
    scripted.chat(n=2)
    scripted.engine.script = lambda request: [EngineDied("gone")]
    scripted.post("/v1/completions", {"prompt": "a"})
    found = scrape(scripted)
    assert total(found, "oscine:request_success_total", finished_reason="length") == 2
    assert total(found, "oscine:request_success_total", finished_reason="error") == 1
    assert total(found, "oscine:time_to_first_token_seconds_count") == 2
    assert total(found, "oscine:inter_token_latency_seconds_count") == 2 * (len("hello") - 1)
    assert total(found, "oscine:request_generation_tokens_sum") == 2 * len("hello")
    assert total(found, "vllm:request_max_num_generation_tokens_sum") == len("hello")
    assert total(found, "vllm:request_max_num_generation_tokens_count") == 2
    assert total(found, "oscine:http_responses_total", path="/v1/chat/completions", status="200") == 1
    assert total(found, "oscine:http_responses_total", path="/v1/completions", status="503") == 1


def test_the_phases_of_a_sequence_add_up(scripted: ScriptedServer) -> None:
    def script(request: GenerationRequest) -> list[GenerationOutput | EngineError]:
        time.sleep(0.03)  # longer than in the queue
        first = GenerationOutput(request.request_id, [65], queue_s=0.02)
        return [first, GenerationOutput(request.request_id, [66], finish_reason="length")]

    scripted.engine.script = script
    scripted.post("/v1/completions", {"prompt": "abc", "n": 2, "max_tokens": 7})
    found = scrape(scripted)

    def seconds(name: str) -> float:
        return total(found, f"vllm:{name}_sum")

    queue, prefill, decode = (seconds(f"request_{name}_time_seconds") for name in ("queue", "prefill", "decode"))
    assert queue >= 0.04
    assert queue + prefill == pytest.approx(seconds("time_to_first_token_seconds"))
    assert prefill + decode == pytest.approx(seconds("request_inference_time_seconds"))
    assert queue + prefill + decode <= seconds("e2e_request_latency_seconds")
    assert total(found, "vllm:request_params_n_sum") == 2
    assert total(found, "vllm:request_params_max_tokens_sum") == 14
    assert total(found, "vllm:request_prompt_tokens_sum") == 6
    assert total(found, "vllm:cache_config_info", block_size="64", num_gpu_blocks="8") == 1


def test_the_histogram_of_steps_has_vllms_name_as_its_second(scripted: ScriptedServer) -> None:
    kinds = {family.name: family.type for family in text_string_to_metric_families(scripted.get("/metrics").text)}
    assert kinds["oscine:iteration_tokens"] == kinds["vllm:iteration_tokens_total"] == "histogram"
    assert {"oscine:iteration_tokens_total", "vllm:iteration_tokens"}.isdisjoint(kinds)
    found = scrape(scripted)
    assert total(found, "vllm:iteration_tokens_total_bucket", le="+Inf") == total(found, "oscine:engine_steps_total")


def test_prompt_tokens_are_counted_by_source(scripted: ScriptedServer) -> None:
    scripted.engine.stats = EngineStats(prompt_tokens=100, local_hits=30, external_hits=20)
    found = scrape(scripted)
    sources = {"local_compute": 50, "local_cache_hit": 30, "external_kv_transfer": 20}
    for source, count in sources.items():
        assert total(found, "vllm:prompt_tokens_by_source_total", source=source, engine="0") == count
    assert total(found, "oscine:prompt_tokens_by_source_total") == total(found, "oscine:prompt_tokens_total")


@pytest.mark.needs("apis")
@pytest.mark.long
def test_turns_that_could_call_are_counted(scripted: ScriptedServer) -> None:
    t = scripted.tokenizer
    said: dict[str, tuple[str | int, ...]] = {
        "tool_call": (t.channel, "commentary to=functions.add ", t.constrain, "json", t.message, "{}", t.call),
        "no_tool_call": (t.channel, "final", t.message, "Well.", t.return_),
    }
    messages = {"model": scripted.service.names[0], "max_tokens": 9, "messages": USER}
    asked: dict[str, tuple[str, dict[str, Any], list[Any]]] = {
        "chat_completions": ("/v1/chat/completions", {"messages": USER}, [{"type": "function", "function": ADD}]),
        "responses": ("/v1/responses", {"input": "x"}, [{"type": "function", **ADD}]),
        "other": ("/v1/messages", messages, [{"name": "add", "input_schema": {}}]),
    }
    num_turns = 0
    for mode, outcome, kind in product(("streaming", "non_streaming"), said, asked):
        (path, body, tools), stream = asked[kind], mode == "streaming"
        scripted.says(*said[outcome])
        assert scripted.post(path, {**body, "stream": stream, "tools": tools}).status_code == 200
        assert scripted.post(path, {**body, "stream": stream, "tools": []}).status_code == 200
        found, num_turns = scrape(scripted), num_turns + 1
        labels = {"mode": mode, "outcome": outcome, "request_type": kind}
        assert total(found, "vllm:tool_call_parser_invocations_total", **labels) == 1
        assert total(found, "vllm:tool_call_parser_invocations_total") == num_turns


def test_kinds_are_those_of_vllm(scripted: ScriptedServer) -> None:
    kinds = {family.name: family.type for family in text_string_to_metric_families(scripted.get("/metrics").text)}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"):
        assert kinds[f"vllm:{name}"] == "gauge"
    for name in ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"):
        assert kinds[f"vllm:{name}"] == "counter"
    assert all(kind == "histogram" for name, kind in kinds.items() if name.endswith("_seconds") and ":" in name)


@pytest.mark.parametrize("name", ["time_to_first_token_seconds", "inter_token_latency_seconds"])
def test_buckets_begin_at_a_millisecond(scripted: ScriptedServer, name: str) -> None:
    edges = {dict(labels)["le"] for known, labels in scrape(scripted) if known == f"vllm:{name}_bucket"}
    assert min(map(float, edges)) == 0.001


def test_errors_are_counted_by_code(scripted: ScriptedServer) -> None:
    scripted.post("/v1/completions", {"prompt": "a", "max_tokens": 10**6})
    scripted.engine.script = lambda request: [EngineDied("gone")]
    scripted.post("/v1/completions", {"prompt": "a"})
    found = scrape(scripted)
    for code in ("context_length_exceeded", "engine_died"):
        assert total(found, "oscine:request_errors_total", path="/v1/completions", code=code) == 1
    assert total(found, "oscine:http_requests_in_progress") == 1  # this scrape


def test_http_requests_are_counted_as_common_dashboards_expect(scripted: ScriptedServer) -> None:
    scripted.post("/v1/completions", {"prompt": "a"})
    scripted.post("/v1/completions", {"prompt": 1})
    scripted.get("/health")
    scripted.get("/nothing")
    found = scrape(scripted)
    text = {"handler": "/v1/completions", "method": "POST"}
    for status in ("2xx", "4xx"):
        assert total(found, "http_requests_total", **text, status=status) == 1
    assert total(found, "http_requests_total") == 3  # a probe is none
    assert total(found, "http_request_duration_seconds_count", **text) == 2


def test_an_engine_that_takes_requests_is_awake(scripted: ScriptedServer) -> None:
    def awake() -> float:
        return total(scrape(scripted), "vllm:engine_sleep_state", sleep_state="awake")

    assert awake() == 1
    scripted.engine.state = "failed"
    assert awake() == 0


def test_paths_that_do_not_exist_share_a_label(scripted: ScriptedServer) -> None:
    for path in ("/a", "/b"):
        scripted.get(path)
    assert total(scrape(scripted), "oscine:http_responses_total", path="other", status="404") == 2


def test_the_engines_numbers_are_those_of_the_moment(scripted: ScriptedServer) -> None:
    scripted.engine.stats = EngineStats(
        num_running=3, kv_slots_used=6, kv_slots_total=8, full_pages_used=2, full_pages_total=8
    )
    found = scrape(scripted)
    assert total(found, "oscine:num_requests_running") == 3
    assert total(found, "oscine:full_pages_used") == 2
    assert (total(found, "oscine:kv_slots_used"), total(found, "oscine:kv_slots")) == (6, 8)
    assert total(found, "oscine:kv_cache_usage_perc") == 0.75
    assert total(found, "oscine:engine_ready") == 1


def test_a_real_engine_counts_the_tokens_of_its_steps(fake_server: ServerProcess) -> None:
    fake_server.wait_idle()

    def steps(most: str) -> float:
        return total(samples(fake_server.get("/metrics")), "vllm:iteration_tokens_total_bucket", le=most)

    single, short, all_steps = steps("1.0"), steps("256.0"), fake_server.metric("oscine:engine_steps_total")
    tokens = fake_server.metric("oscine:iteration_tokens_sum")
    fake_server.post("/v1/completions", {"prompt": "x" * 300, "max_tokens": 17})
    fake_server.wait_idle()
    wait_until(lambda: fake_server.metric("oscine:engine_steps_total") - all_steps == 17, "all steps of the answer")
    assert steps("1.0") - single == steps("256.0") - short == 16
    assert steps("+Inf") - all_steps == 17
    assert fake_server.metric("oscine:iteration_tokens_sum") - tokens == 300 + 16


def test_a_real_engine_counts_tokens(fake_server: ServerProcess) -> None:
    fake_server.wait_idle()
    before = fake_server.metric("oscine:generation_tokens_total")
    fake_server.post("/v1/completions", {"prompt": "a", "max_tokens": 17, "n": 2})
    fake_server.wait_idle()
    assert fake_server.metric("oscine:generation_tokens_total") - before == 34


def test_histograms_are_those_of_the_library() -> None:
    name = "request_time_per_output_token_seconds"
    what, bounds = HISTOGRAMS[name]
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    oracle = Histogram(f"oscine:{name}", what, ["model_name"], registry=theirs, buckets=bounds).labels("a")
    found = SequenceFamilies(ours).histograms("a")[name]
    for value_s in (0.0, 0.0005, 0.001, 0.00101, 0.0149, 0.015, 0.5, 4.99, 5.0, 5.1, 1e9):
        oracle.observe(value_s)
        found.observe(value_s)
    (family,) = (family for family in ours.collect() if family.name == f"oscine:{name}")
    (expected,) = theirs.collect()
    assert (family.type, family.documentation) == (expected.type, expected.documentation)
    assert family.samples == [sample for sample in expected.samples if not sample.name.endswith("_created")]
