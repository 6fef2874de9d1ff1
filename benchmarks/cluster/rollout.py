"""Two models at once, and an update of one of them under load: `make cluster-rollout`.

    python -m benchmarks.cluster.rollout [--clients 8]

The embedded model has two names with different options. A request for a third name must get 404. Then clients stream
greedy answers without a pause, while every replica of the first model is replaced by one with other options. No request
may fail, every text must stay the same, and the replicas of the second model must not change. Exit status 1 if any of
this fails.
"""

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field

import openai

from benchmarks.cluster.cluster import Cluster
from oscine.extensions.replicas.spec.deployment import Deployment, ModelSpec, Replicas, RoleSpec
from oscine.settings.config import CacheOptions, EngineOptions, SchedulerOptions, ServerOptions

FIRST, SECOND, UNKNOWN = "first", "second", "third"
QUESTIONS = [f"What is {a} + {b}?" for a, b in ((27, 58), (12, 30), (41, 9), (66, 17))]
_AFTER_S = 2.0  # of load after the end of the update


def deployment(max_num_seqs: int) -> Deployment:
    """`max_num_seqs`: sequences that the first model's engines run at once."""

    def model(name: str, replicas: int, max_num_seqs: int) -> ModelSpec:
        engine = EngineOptions(
            cache=CacheOptions(kv_cache_bytes=64 << 20),
            scheduler=SchedulerOptions(max_num_seqs=max_num_seqs),
            quiet=True,
        )
        return ModelSpec((name,), (RoleSpec(engine=engine, replicas=Replicas(replicas, replicas), cpus=0.25),))

    models = model(FIRST, 2, max_num_seqs), model(SECOND, 1, 4)
    return Deployment(models, server=ServerOptions(port=0, drain_s=10.0), prefix_seed="5eed" * 8)


@dataclass
class Load:
    """Clients that ask one question after the other, and their results."""

    client: openai.AsyncOpenAI
    expected: dict[str, str]
    done: int = 0
    failed: list[str] = field(default_factory=list)
    longest_pause_s: float = 0.0  # between two chunks of a stream
    over: bool = False

    async def run(self, number: int) -> None:
        while not self.over:
            question = QUESTIONS[number % len(QUESTIONS)]
            number += 1
            try:
                text = await self._stream(question)
            except openai.OpenAIError as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                continue
            self.done += 1
            if text != self.expected[question]:
                self.failed.append(f"{question} was answered by {text!r}")

    async def _stream(self, question: str) -> str:
        text, heard_s = "", time.monotonic()
        stream = await self.client.chat.completions.create(
            model=FIRST, messages=[{"role": "user", "content": question}], temperature=0, stream=True
        )
        async for chunk in stream:
            now = time.monotonic()
            self.longest_pause_s = max(self.longest_pause_s, now - heard_s)
            heard_s = now
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        return text


def replicas(model: str) -> set[str]:
    from oscine.extensions.cluster.ray import control

    known = control.state().snapshot
    assert known is not None
    return {replica.replica for replica in known.replicas if replica.model == model and replica.state == "ready"}


async def measure(cluster: Cluster, clients: int) -> bool:
    client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    names = sorted([model.id async for model in client.models.list()])
    print(f"models: {', '.join(names)}; {UNKNOWN}: {await _status(client, UNKNOWN)}")
    right = names == [FIRST, SECOND] and await _status(client, UNKNOWN) == 404
    expected = {question: await _answer(client, SECOND, question) for question in QUESTIONS}
    before = {name: await asyncio.to_thread(replicas, name) for name in names}
    load = Load(client, expected)
    running = [asyncio.create_task(load.run(i)) for i in range(clients)]
    started_s = time.monotonic()
    await asyncio.to_thread(cluster.up, deployment(8))
    updated_s = time.monotonic() - started_s
    await asyncio.sleep(_AFTER_S)
    load.over = True
    await asyncio.gather(*running)
    after = {name: await asyncio.to_thread(replicas, name) for name in names}
    replaced = len(after[FIRST]) == 2 and not before[FIRST] & after[FIRST]
    kept = before[SECOND] == after[SECOND]
    print(
        f"update of 2 replicas in {updated_s:.1f} s under {clients} clients: {load.done} requests done, "
        f"{len(load.failed)} failed, longest pause {load.longest_pause_s:.2f} s; "
        f"{FIRST} {'replaced' if replaced else 'NOT replaced'}, {SECOND} {'kept' if kept else 'NOT kept'}"
    )
    for failure in load.failed[:5]:
        print(f"  {failure}")
    return right and replaced and kept and load.done > 0 and not load.failed


async def _status(client: openai.AsyncOpenAI, model: str) -> int:
    try:
        await _answer(client, model, QUESTIONS[0])
    except openai.APIStatusError as error:
        return error.status_code
    return 200


async def _answer(client: openai.AsyncOpenAI, model: str, question: str) -> str:
    answer = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0
    )
    return answer.choices[0].message.content or ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8, help="clients at once (default: %(default)s)")
    args = parser.parse_args()
    with Cluster(deployment(16)) as cluster:
        return 0 if asyncio.run(measure(cluster, args.clients)) else 1


if __name__ == "__main__":
    sys.exit(main())
