"""Dynamo's KV router knows the content of each engine's prefix cache: a conversation stays on its first worker."""

from pathlib import Path
from typing import Any

from tests.extensions.dynamo.fleet import DynamoWorker, Fleet

PAGE = 64  # tokens
TURNS = 4
QUESTION = {"role": "user", "content": "What is 27 + 58?"}
ANSWER = {"role": "assistant", "content": "27 + 58 = 85."}


class Session:
    """A conversation with instructions of its own, of several pages."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        text = f"You are {name}. " + f"{name} explains each step of a sum and checks the result twice. " * 6
        self._fleet = fleet
        self._messages: list[dict[str, Any]] = [{"role": "developer", "content": text}]

    def ask(self, **more: Any) -> Any:
        """The next turn."""
        reply = self._fleet.ask(*self._messages, QUESTION, **({"max_tokens": 16} | more))
        self._messages += [QUESTION, ANSWER]
        return reply


def seen(workers: list[DynamoWorker]) -> list[tuple[int, int]]:
    """Prompt tokens that came to each worker, and those that its own prefix cache had."""
    return [(worker.metric("prompt_tokens_total"), worker.metric("prefix_cache_hits_total")) for worker in workers]


def test_a_conversation_stays_where_its_prefix_is(tmp_path: Path, vocabulary: Path) -> None:
    with Fleet(tmp_path, vocabulary, "aggregated", "aggregated") as fleet:
        ours, theirs = Session(fleet, "Ada"), Session(fleet, "Brahmagupta")
        stream = ours.ask(stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
        for _ in range(3):
            next(stream)
        # A prefix that no worker has goes to the one that is idle.
        theirs.ask()
        counts = seen(fleet.workers)
        assert all(tokens > 3 * PAGE for tokens, _ in counts)
        home = [worker.metric("num_requests_running") for worker in fleet.workers].index(1)
        stream.close()
        for _ in range(TURNS):
            for session, worker in ((ours, home), (theirs, 1 - home)):
                before = seen(fleet.workers)
                usage = session.ask().usage
                after = seen(fleet.workers)
                cached = usage.prompt_tokens_details.cached_tokens
                assert after[1 - worker] == before[1 - worker]
                assert after[worker] == (before[worker][0] + usage.prompt_tokens, before[worker][1] + cached)
                # All of the prompt before but what was in its last page, and what this turn adds.
                assert cached >= usage.prompt_tokens - 2 * PAGE
