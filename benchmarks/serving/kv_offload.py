"""Sessions of several turns whose KV is larger than the cache: the time to the first token with and without offloading.

    python -m benchmarks.serving.kv_offload                          fake executor with the pages of gpt-oss-20b
    python -m benchmarks.serving.kv_offload --model oscine-nano --device cpu
    python -m benchmarks.serving.kv_offload --model 20b --device cuda

All sessions together have --over times the tokens that the cache holds. Each turn comes after a pause, in an order of
its own, and adds some tokens; the first turn is not measured. The engine process is real. The fake executor takes the
time of a prompt on an H200 for each token, and checks what its pages hold when a sequence begins on them. Runs with
host memory, with files behind little host memory, after a restart, and without. Exits with 1 if the 90th percentile
with host memory is more than 0.4 of that without, or if greedy tokens differ on a CPU.
"""

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from oscine.checkpoint.hub import NANO_FOLDER
from oscine.engine.process.client import EngineClient
from oscine.model.config import gpt_oss_20b
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from oscine.types import EngineStats, GenerationRequest, SamplingParams

LINE = 0.4  # of the 90th percentile without offloading
FAKE_TOKEN_S = 17.5e-6  # a prompt's token of gpt-oss-20b on an H200
FAKE_STEP_S = 0.003
SHAPES = ("20b", "120b")


@dataclass(frozen=True)
class Load:
    sessions: int
    turns: int
    first_tokens: int
    turn_tokens: int
    reply_tokens: int
    think_s: float
    vocab: int = 1000

    @property
    def tokens_per_session(self) -> int:
        return self.first_tokens + (self.turns - 1) * self.turn_tokens + self.turns * self.reply_tokens

    @property
    def num_tokens(self) -> int:
        return self.sessions * self.tokens_per_session


@dataclass
class Outcome:
    name: str
    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between tokens, the mean of each reply
    replies: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # by session and turn
    errors: int = 0
    stats: EngineStats = field(default_factory=EngineStats)

    @property
    def p90_ms(self) -> float:
        return 1e3 * statistics.quantiles(self.ttfts, n=10)[-1]

    def row(self) -> dict[str, object]:
        stats = self.stats
        return {
            "run": self.name,
            "ttft_p50_ms": round(1e3 * statistics.median(self.ttfts), 1),
            "ttft_p90_ms": round(self.p90_ms, 1),
            "itl_mean_ms": round(1e3 * statistics.mean(self.gaps), 2),
            "hit_rate": round(stats.prefix_hits / max(1, stats.prefix_queries), 3),
            "saved": stats.offload_saved_pages,
            "lost": stats.offload_lost_pages,
            "from_host": stats.offload_host_hits,
            "from_disk": stats.offload_disk_hits,
            "declined": stats.offload_declined,
            "host_us_per_page": _per_page(stats.offload_host_s, stats.offload_host_hits),
            "disk_us_per_page": _per_page(stats.offload_disk_s, stats.offload_disk_hits),
            "errors": self.errors,
        }


def _per_page(seconds: float, pages: int) -> float | None:
    return round(1e6 * seconds / pages, 1) if pages else None


class Sessions:
    """The same load for every run."""

    def __init__(self, load: Load, engine: EngineClient, outcome: Outcome) -> None:
        self._load, self._engine, self._outcome, self._ids = load, engine, outcome, count()

    async def all(self) -> None:
        await asyncio.gather(*[self._session(number) for number in range(self._load.sessions)])
        self._outcome.stats = self._engine.stats

    async def _session(self, number: int) -> None:
        load, rng = self._load, random.Random(number)
        known: list[int] = []
        for turn in range(load.turns):
            await asyncio.sleep(rng.uniform(0.5, 1.5) * load.think_s if turn else rng.uniform(0, load.think_s))
            added = load.turn_tokens if turn else load.first_tokens
            known += [rng.randrange(load.vocab) for _ in range(added)]
            reply = await self._request(known, is_measured=turn > 0)
            self._outcome.replies[number, turn] = reply
            known += reply

    async def _request(self, prompt: list[int], is_measured: bool) -> list[int]:
        outcome, reply = self._outcome, list[int]()
        sampling = SamplingParams(max_tokens=self._load.reply_tokens, temperature=0)
        asked_s = time.perf_counter()
        first_s = asked_s
        async with self._engine.submit(GenerationRequest(f"{next(self._ids)}", list(prompt), sampling)) as stream:
            async for outputs in stream:
                if not reply:
                    first_s = time.perf_counter()
                for output in outputs:
                    reply += output.token_ids
                    outcome.errors += output.error is not None
        if is_measured:
            outcome.ttfts.append(first_s - asked_s)
            outcome.gaps.append((time.perf_counter() - first_s) / max(1, len(reply) - 1))
        return reply


async def measure(name: str, load: Load, options: EngineOptions) -> Outcome:
    outcome = Outcome(name)
    async with AsyncExitStack() as stack:
        engine = EngineClient(options)
        stack.push_async_callback(engine.stop)
        await engine.start()
        await engine.wait_ready()
        await Sessions(load, engine, outcome).all()
    print(json.dumps(outcome.row()), flush=True)
    return outcome


def fake_model(folder: Path) -> str:
    """A folder with the layers of gpt-oss-20b, and the tokenizer and vocabulary of the embedded model."""
    shutil.copy(NANO_FOLDER / "tokenizer.json", folder)
    sizes, nano = gpt_oss_20b().to_dict(), json.loads((NANO_FOLDER / "config.json").read_text())
    vocabulary = {name: nano[name] for name in ("vocab_size", "eos_token_id", "pad_token_id")}
    (folder / "config.json").write_text(json.dumps(sizes | vocabulary))
    return str(folder)


def options_of(args: argparse.Namespace, folder: Path) -> EngineOptions:
    """Without offloading."""
    length = 2 * (args.first_tokens + args.turns * (args.turn_tokens + args.reply_tokens))
    cache = CacheOptions(page_size=args.page_size, kv_cache_bytes=args.kv_cache_bytes)
    scheduler = SchedulerOptions(max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens)
    if args.model == "fake":
        model = ModelOptions(fake_model(folder), max_model_len=length)
        options = EngineOptions(model, cache, scheduler, executor="fake", quiet=True)
        return replace(options, fake_token_s=FAKE_TOKEN_S, fake_step_s=FAKE_STEP_S)
    known = args.model in SHAPES or Path(args.model).suffix == ".json"
    model = ModelOptions(random_weights=args.model) if known else ModelOptions(args.model)
    return EngineOptions(replace(model, device=args.device, max_model_len=length), cache, scheduler, quiet=True)


def with_offload(options: EngineOptions, host_bytes: int, folder: Path | None, disk_bytes: int) -> EngineOptions:
    name = None if folder is None else str(folder)
    offload = {"kv_offload_bytes": host_bytes, "kv_offload_dir": name, "kv_offload_disk_bytes": disk_bytes}
    return replace(options, cache=replace(options.cache, **offload))


async def load_of(args: argparse.Namespace, options: EngineOptions) -> Load:
    """As many sessions as have --over times the tokens that the cache holds in the end."""
    engine = EngineClient(options)
    await engine.start()
    await engine.wait_ready()
    pages = engine.stats.full_pages_total
    await engine.stop()
    load = Load(1, args.turns, args.first_tokens, args.turn_tokens, args.reply_tokens, args.think_s)
    sessions = round(args.over * pages * args.page_size / load.num_tokens)
    if sessions < 4:
        raise SystemExit(f"a cache of {pages * args.page_size} tokens is too small for sessions of {load.num_tokens}")
    load = replace(load, sessions=sessions)
    print(
        f"{sessions} sessions of {load.turns} turns, {load.num_tokens} tokens; the cache holds {pages} pages",
        flush=True,
    )
    return load


async def run_all(args: argparse.Namespace, base: EngineOptions, load: Load, folder: Path) -> list[Outcome]:
    host = with_offload(base, args.host_bytes, None, args.disk_bytes)
    disk = with_offload(base, args.staging_bytes, folder, args.disk_bytes)
    # The fake executor has the pages of --kv-cache-bytes only with offloading: a slot of host memory changes nothing.
    without = with_offload(base, args.slot_bytes, None, args.disk_bytes) if args.model == "fake" else base
    runs = {"without": without, "host memory": host, "files": disk, "files, restarted": disk}
    return [await measure(name, load, options) for name, options in runs.items() if name not in args.skip]


def report(args: argparse.Namespace, outcomes: list[Outcome]) -> int:
    """Returns the exit status."""
    without, *others = outcomes
    failed = any(outcome.errors for outcome in outcomes)
    for outcome in others:
        ratio = outcome.p90_ms / without.p90_ms
        different = sum(outcome.replies[turn] != reply for turn, reply in without.replies.items())
        print(f"{outcome.name}: p90 of the first token {ratio:.2f} of that without; {different} replies differ")
        failed |= outcome.name == "host memory" and ratio > LINE
        failed |= args.device == "cpu" and different > 0
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="fake", help="fake, 20b or 120b with random weights, a config.json, or a model")
    add("--device", default="cpu")
    add("--over", type=float, default=1.3, help="tokens of all sessions, as a multiple of the cache")
    add("--turns", type=int, default=5)
    add("--first-tokens", type=int, default=8000)
    add("--turn-tokens", type=int, default=150)
    add("--reply-tokens", type=int, default=50)
    add("--think-s", type=float, default=6.0, help="mean pause before a turn")
    add("--page-size", type=int, default=64)
    add("--max-num-seqs", type=int, default=16)
    add("--max-num-batched-tokens", type=int, default=1024)
    add("--kv-cache-bytes", type=int, default=3 << 29)
    add("--host-bytes", type=int, default=1 << 30, help="of the run with host memory alone")
    add("--staging-bytes", type=int, default=128 << 20, help="of host memory, where files are behind it")
    add("--disk-bytes", type=int, default=8 << 30)
    add("--slot-bytes", type=int, default=1 << 20, help=argparse.SUPPRESS)
    add("--folder", type=Path, help="where the files go (default: a temporary one)")
    add("--skip", nargs="*", default=[], help="names of runs to leave out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        base = options_of(args, Path(place))
        probe = with_offload(base, args.slot_bytes, None, args.disk_bytes) if args.model == "fake" else base
        load = asyncio.run(load_of(args, probe))
        outcomes = asyncio.run(run_all(args, base, load, Path(place) / "pages"))
    return report(args, outcomes)


if __name__ == "__main__":
    sys.exit(main())
