"""A server that drafts with the embedded model's head: the same answers, and what /metrics tells of the drafts."""

from prometheus_client.parser import text_string_to_metric_families

from tests.server import ServerProcess
from tests.waiting import wait_until


def metrics(server: ServerProcess) -> dict[tuple[str, str | None], float]:
    """Of speculation, by name and position."""
    return {
        (sample.name, sample.labels.get("position")): sample.value
        for family in text_string_to_metric_families(server.get("/metrics"))
        for sample in family.samples
        if sample.name.startswith("vllm:spec_decode")
    }


def test_a_server_drafts_and_tells_how_well(nano_server: ServerProcess) -> None:
    question = {
        "model": "oscine-nano",
        "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        "temperature": 0,
        "max_tokens": 200,
    }
    expected = nano_server.post("/v1/chat/completions", question)["choices"]
    assert not any("spec_decode" in line for line in nano_server.get("/metrics").splitlines())
    name = "vllm:spec_decode_num_"
    options = ("--date", "2025-08-05", "--log-level", "warning", "--speculative-config", "eagle3")
    with ServerProcess(*options) as server:
        assert server.post("/v1/chat/completions", question)["choices"] == expected
        # The engine tells its statistics some times per second, so those of a short answer may come after it.
        wait_until(lambda: metrics(server)[f"{name}drafts_total", None] > 0, "drafts")
        found = metrics(server)
    drafts, tokens, accepted = (
        found[f"{name}{what}_total", None] for what in ("drafts", "draft_tokens", "accepted_tokens")
    )
    places = [found[key] for key in sorted(key for key in found if key[0] == f"{name}accepted_tokens_per_pos_total")]
    assert 0 < drafts <= tokens
    assert 0 < accepted <= tokens
    assert sum(places) == accepted
    assert places == sorted(places, reverse=True)
    assert places[0] <= drafts
