"""A soak test: 1,000 mixed requests at random moments, one in ten cancelled midway.

    python -m benchmarks.serving.soak [--requests 1000] [--seed 0]

Each distinct request is first answered alone; under load every answer must be the same, and at the end no request may
run or wait and no page may be in use. Exit status 1 and the differing answers otherwise.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.serving.server import Server

IDLE_METRICS = (
    "oscine:num_requests_running",
    "oscine:num_requests_waiting",
    "oscine:full_pages_used",
    "oscine:sliding_pages_used",
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Gets the current weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city"}},
            "required": ["city"],
        },
    },
}
Body = dict[str, Any]


def user(text: str) -> Body:
    return {"role": "user", "content": text}


def arithmetic(rng: random.Random) -> Body:
    a, b = rng.randrange(1000), rng.randrange(1000)
    return {"messages": [user(f"What is {a} {rng.choice('+-')} {b}?")], "reasoning_effort": rng.choice(("low", "high"))}


def several_turns(rng: random.Random) -> Body:
    a, b, c = (rng.randrange(100) for _ in range(3))
    turns = [user(f"{a} + {b}"), {"role": "assistant", "content": f"{a} + {b} = {a + b}."}, user(f"What is {b} + {c}?")]
    return {"messages": turns}


def tool_call(rng: random.Random) -> Body:
    city = rng.choice(("Lisbon", "Osaka", "Quito", "Tromso"))
    return {"messages": [user(f"What is the weather in {city}?")], "tools": [WEATHER]}


def tool_result(rng: random.Random) -> Body:
    call = {"name": "get_weather", "arguments": '{"city":"Lisbon"}'}
    turns = [
        user("What is the weather in Lisbon?"),
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": json.dumps({"temperature": rng.randrange(30)})},
    ]
    return {"messages": turns, "tools": [WEATHER]}


def long_context(rng: random.Random) -> Body:
    keys = [f"{rng.randrange(10**6):06d}" for _ in range(rng.randrange(40, 120))]
    lines = [f"The code of box {i} is {key}." for i, key in enumerate(keys)]
    return {"messages": [user(" ".join(lines) + f" What is the code of box {rng.randrange(len(keys))}?")]}


def sampled(rng: random.Random) -> Body:
    return arithmetic(rng) | {"temperature": 1.0, "top_p": 0.9, "seed": rng.randrange(2**31), "n": 2}


def penalised(rng: random.Random) -> Body:
    return arithmetic(rng) | {"frequency_penalty": 0.3, "logprobs": True, "top_logprobs": 3, "stop": ["="]}


def raw_completion(rng: random.Random) -> Body:
    return {"prompt": f"{rng.randrange(99)} plus {rng.randrange(99)} is", "max_tokens": 24, "logprobs": 2, "echo": True}


KINDS: tuple[Callable[[random.Random], Body], ...] = (
    arithmetic,
    several_turns,
    tool_call,
    tool_result,
    long_context,
    sampled,
    penalised,
    raw_completion,
)


@dataclass(frozen=True)
class Request:
    kind: str
    body: Body

    @property
    def path(self) -> str:
        return "/v1/completions" if "prompt" in self.body else "/v1/chat/completions"


def distinct_requests(rng: random.Random, model: str, a_kind: int) -> list[Request]:
    common = {"model": model, "temperature": 0.0, "max_tokens": 160}
    return [Request(kind.__name__, common | kind(rng)) for kind in KINDS for _ in range(a_kind)]


def essence(answer: Body) -> Body:
    """The parts of an answer that must not depend on other requests: all but ids, times and cache hits."""
    choices = answer["choices"]
    for choice in choices:
        for call in choice.get("message", {}).get("tool_calls") or ():
            call.pop("id")
    usage = answer["usage"]
    return {"choices": choices, "usage": {k: usage[k] for k in ("prompt_tokens", "completion_tokens")}}


def without_logprobs(answer: Body) -> Body:
    """Log-probabilities are compared as close, not as equal: batching changes float32 rounding."""
    return answer | {"choices": [{k: v for k, v in c.items() if k != "logprobs"} for c in answer["choices"]]}


def logprob_numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [x for v in value.values() for x in logprob_numbers(v)]
    if isinstance(value, list):
        return [x for v in value for x in logprob_numbers(v)]
    return [value] if isinstance(value, float) else []


def same(a: Body, b: Body) -> bool:
    numbers = [[logprob_numbers(c.get("logprobs")) for c in answer["choices"]] for answer in (a, b)]
    close = all(
        len(x) == len(y) and all(abs(p - q) < 1e-3 for p, q in zip(x, y, strict=True))
        for x, y in zip(*numbers, strict=True)
    )
    return close and without_logprobs(a) == without_logprobs(b)


async def ask(client: httpx.AsyncClient, request: Request) -> Body:
    response = await client.post(request.path, json=request.body)
    if response.status_code != 200:
        raise RuntimeError(f"{request.kind}: {response.status_code} {response.text}")
    return essence(response.json())


async def abandon(client: httpx.AsyncClient, request: Request, rng: random.Random) -> bool:
    """Cancels midway: a stream after a few chunks, a plain request after a moment. False if the answer came first."""
    if rng.random() < 0.5:
        chunks = rng.randrange(1, 20)
        async with client.stream("POST", request.path, json=request.body | {"stream": True}) as response:
            async for _ in response.aiter_lines():
                chunks -= 1
                if not chunks:
                    return True
    else:
        try:
            await asyncio.wait_for(client.post(request.path, json=request.body), rng.uniform(0.01, 0.5))
        except TimeoutError:
            return True
    return False


@dataclass
class Outcome:
    outcomes: Counter[str]
    wall_s: float
    tokens: int


async def soak(url: str, requests: list[Request], count: int, rate: float, rng: random.Random) -> Outcome:
    outcomes: Counter[str] = Counter()
    tokens = 0
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        alone = [await ask(client, request) for request in requests]

        async def one(index: int, cancelled: bool, seed: int) -> None:
            nonlocal tokens
            if cancelled:
                cut = await abandon(client, requests[index], random.Random(seed))
                outcomes["cancelled" if cut else "over before they were cancelled"] += 1
                return
            answer = await ask(client, requests[index])
            tokens += answer["usage"]["completion_tokens"]
            good = same(answer, alone[index])
            outcomes["same" if good else "different"] += 1
            if not good:
                print(f"{requests[index].kind}\n  alone: {alone[index]}\n  under load: {answer}", file=sys.stderr)

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(one(rng.randrange(len(requests)), rng.random() < 0.1, rng.randrange(2**31)))
                await asyncio.sleep(rng.expovariate(rate))
        return Outcome(outcomes, time.perf_counter() - started, tokens)


def wait_idle(server: Server, timeout_s: float = 10.0) -> dict[str, float]:
    """Waits until the metrics are zero. Returns those that are not after the time-out."""
    deadline = time.monotonic() + timeout_s
    while busy := {name: value for name in IDLE_METRICS if (value := server.metric(name)) != 0}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="requests in all (default: %(default)s)")
    parser.add_argument(
        "--rate", type=float, default=25.0, help="arrivals per second, at random moments (default: %(default)s)"
    )
    parser.add_argument("--distinct", type=int, default=8, help="distinct requests of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: %(default)s)")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    # A small cache: requests are preempted and pages evicted, not only shared.
    with Server("--log-level", "warning", "--kv-cache-bytes", str(48 << 20), "--max-model-len", "4096") as server:
        requests = distinct_requests(rng, server.model(), args.distinct)
        result = asyncio.run(soak(server.url, requests, args.requests, args.rate, rng))
        busy = wait_idle(server)
        hits = server.metric("oscine:prefix_cache_hits_total") / server.metric("oscine:prefix_cache_queries_total")
        preemptions = server.metric("oscine:num_preemptions_total")
    counts = ", ".join(f"{n} {what}" for what, n in sorted(result.outcomes.items()))
    print(
        f"{args.requests} requests in {result.wall_s:.0f} s ({result.tokens / result.wall_s:,.0f} tokens/s): {counts}"
    )
    print(f"prefix hits {hits:.0%}, preemptions {preemptions:.0f}, still in use at the end: {busy or 'nothing'}")
    sys.exit(bool(busy or result.outcomes["different"]))


if __name__ == "__main__":
    main()
