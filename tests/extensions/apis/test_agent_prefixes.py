"""How much of each agent's prompts the prefix cache has, counted by the engine's own cache and told in usage."""

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from tests.api.caching_engine import PAGE, CachingEngine
from tests.api.scripted_server import ScriptedServer
from tests.clients.checked_app import CHECKS
from tests.extensions.apis.agent_jobs import Agent, ClaudeCode, Codex, OpenCode, reply

TURNS = 30
AGENTS = [ClaudeCode, Codex, OpenCode]


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(model_folder, engine=CachingEngine()) as server:
        yield server


def job(server: ScriptedServer, agent: Agent) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """Runs a job. Returns the prompts, the cached tokens of each as the client is told, and what the model wrote."""
    assert isinstance(server.engine, CachingEngine)
    cached, written, first = [], [], len(server.engine.requests)
    for turn in range(TURNS):
        written.append(reply(server, turn))
        server.engine.replies.append(written[-1])
        answer = server.post(agent.path, {**agent.body, "model": server.service.names[0]})
        assert answer.status_code == 200, answer.text
        CHECKS[agent.path][False](answer.text)
        cached.append(agent.take(answer.json(), f"{turn} passed, 1 failed\n" * 10))
    return [request.prompt_token_ids for request in server.engine.requests[first:]], cached, written


def common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.mark.parametrize("agent", AGENTS)
def test_a_second_job_in_another_folder_finds_its_prefixes(server: ScriptedServer, agent: type[Agent]) -> None:
    earlier, *_ = job(server, agent("/home/a/shop"))
    prompts, cached, written = job(server, agent("/home/a/office"))
    for before, said, after in zip(prompts, written, prompts[1:], strict=False):
        assert after[: len(before) + len(said)] == [*before, *said], "a turn continues the one before it"
    shared = [common(*pair) for pair in zip(prompts, [earlier[0], *prompts], strict=False)]
    whole_pages = [num_tokens // PAGE * PAGE for num_tokens in shared]
    assert sum(cached) >= 0.95 * sum(whole_pages)
    assert cached[0] >= 0.95 * whole_pages[0]
    head = server.tokenizer.decode(prompts[0][: shared[0]])
    assert "} // namespace functions<|end|>" in head, "all tools are common to both folders"
