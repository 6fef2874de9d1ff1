"""A batch of chats with the embedded model: through the Python API, and through HTTP with the same concurrency.

    python -m benchmarks.serving.offline [--prompts 1000] [--runs 3]

Both use one engine with the same options, greedy. The HTTP client is httpx in this process, as in `oscine batch`. The
two take turns, and each starts its engine anew, so that neither finds the other's cached prefixes. The time of the
start is not counted. Prints seconds and generated tokens/s of each run, the CPU seconds outside the engine (this
process, and the server's API process), and the medians with their ratio.
"""

import argparse
import asyncio
import statistics
import time

import httpx
import psutil

from benchmarks.serving.server import Server
from oscine import LLM
from oscine.settings.config import SchedulerOptions

CONCURRENCY = 2 * SchedulerOptions().max_num_seqs  # as an LLM has it
_DATE = "2025-08-05"


def questions(count: int) -> list[str]:
    return [f"What is {100 + i % 899} + {100 + (7 * i) % 883}?" for i in range(count)]


Measured = tuple[float, int, float]  # seconds, generated tokens, CPU seconds outside the engine


def python(count: int) -> Measured:
    with LLM(date=_DATE) as llm:
        llm.chat("What is 1 + 1?", temperature=0)
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        answers = llm.chat(questions(count), temperature=0, progress=False)
        elapsed_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        return elapsed_s, sum(answer.usage.completion_tokens for answer in answers), cpu_s


def http(count: int) -> Measured:
    with Server("--date", _DATE, "--log-level", "warning") as server:
        api = psutil.Process(server.pid)
        before_s = _cpu_s(api) + time.process_time()
        elapsed_s, tokens = asyncio.run(_ask_all(server.url, count))
        return elapsed_s, tokens, _cpu_s(api) + time.process_time() - before_s


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _ask_all(url: str, count: int) -> tuple[float, int]:
    todo, tokens = iter(questions(count)), 0
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

        async def ask(question: str) -> int:
            body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
            answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status()
            return int(answer.json()["usage"]["completion_tokens"])

        async def take_turns() -> None:
            nonlocal tokens
            for question in todo:
                found = await ask(question)
                tokens += found

        await ask("What is 1 + 1?")
        begin_s = time.perf_counter()
        await asyncio.gather(*(take_turns() for _ in range(CONCURRENCY)))
        return time.perf_counter() - begin_s, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"python": [], "http": []}
    for _ in range(options.runs):
        for name, measure in (("python", python), ("http", http)):
            elapsed_s, tokens, cpu_s = measure(options.prompts)
            seconds[name].append(elapsed_s)
            print(f"{name:8}{elapsed_s:8.2f} s {tokens / elapsed_s:10,.0f} tokens/s {cpu_s:8.2f} s of CPU", flush=True)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    print(f"medians: {medians}; http / python = {medians['http'] / medians['python']:.2f}")


if __name__ == "__main__":
    main()
