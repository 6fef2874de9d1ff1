"""The load: sessions like those of `oscine bench serve`, and traces, whose known prefixes are all found."""

import json
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from oscine.checkpoint.hub import NANO_FOLDER
from oscine.extensions.bench.serve.load import BLOCK, Lengths, RandomLoad, Shapes
from oscine.extensions.bench.serve.words import Words
from oscine.extensions.kv_events.publisher import page_hash
from oscine.extensions.plan.fleet.clients import Traffic
from oscine.extensions.plan.traffic.random_sessions import sessions
from oscine.extensions.plan.traffic.trace import read_trace
from oscine.extensions.replicas.routing.kv_index import KVIndex
from tests.extensions.plan.fleets import PAGE, deployment, simulate

SHAPES = Shapes(Lengths(100, 30, 0.5), turns=3, prefix_tokens=150, num_prefixes=2, seed=3)


def test_sessions_are_those_that_the_load_generator_sends() -> None:
    sent = islice(RandomLoad(Words.of(NANO_FOLDER, 3), SHAPES, as_ids=True).sessions(), 20)
    for theirs, ours in zip(sent, sessions(SHAPES, PAGE), strict=False):
        known = 0  # tokens of the session before this turn
        for sent_turn, turn in zip(theirs, ours, strict=True):
            assert isinstance(sent_turn.prompt, list)
            known += len(sent_turn.prompt)
            assert (turn.prompt_tokens, turn.max_tokens) == (known, sent_turn.max_tokens)
            known += sent_turn.max_tokens


def test_pages_have_equal_addresses_where_their_tokens_are_equal() -> None:
    """Two sessions share the whole pages of their prefix, if it is the same; the router sees each page as another."""
    some = list(islice(sessions(SHAPES, PAGE), 20))
    pages = [session[-1].addresses(0, 6) for session in some]
    prefixes = {tuple(own[:2]) for own in pages}
    assert len(prefixes) == 2, "150 tokens are two pages"
    own = [page for each in pages for page in each[2:]]
    everything = {page for each in pages for page in each}
    assert len(set(own)) == len(own) == 20 * 4
    assert len({page_hash(page) for page in everything}) == len(everything) == 4 + len(own)
    for session in some:
        whole = session[0].addresses(0, 6)
        assert [turn.addresses(2, 5) for turn in session] == [whole[2:5]] * 3


def written(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def random_trace(random: Random, count: int) -> list[dict[str, object]]:
    """Prompts that branch off from each other; a block's id is made of all blocks before it."""
    chains: list[list[int]] = [[]]
    lines, new = list[dict[str, object]](), 0
    for number in range(count):
        chain = random.choice(chains)[: random.randrange(8)]
        for _ in range(random.randrange(1, 5)):
            chain = [*chain, new]
            new += 1
        chains.append(chain)
        tokens = (len(chain) - 1) * BLOCK + random.randrange(1, BLOCK + 1)
        times = {"timestamp": 20_000 * number, "input_length": tokens, "output_length": random.randrange(1, 40)}
        lines.append({**times, "hash_ids": chain})
    return lines


def ideal_hits(lines: list[dict[str, object]]) -> int:
    """Tokens of whole pages that an earlier prompt had, but never the last token: compared with all earlier prompts."""
    hits, seen = 0, list[tuple[list[int], int]]()
    for line in lines:
        ids, length = line["hash_ids"], line["input_length"]
        assert isinstance(ids, list)
        assert isinstance(length, int)
        best = 0
        for other, other_length in seen:
            same = next(
                (i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other))
            )
            best = max(best, min(same * BLOCK, other_length) // PAGE)
        hits += min(best, (length - 1) // PAGE) * PAGE
        seen.append((ids, length))
    return hits


def test_with_memory_for_everything_every_known_prefix_is_found(tmp_path: Path) -> None:
    lines = random_trace(Random(4), 60)
    found = read_trace(written(tmp_path / "trace.jsonl", lines), PAGE)
    model, specs = deployment(num_pages=(20_000, 20_000))
    traffic = Traffic([one.session for one in found], [one.ns for one in found])
    outcome = simulate(model, specs, traffic)
    assert ideal_hits(lines) > 20 * BLOCK
    assert outcome.total.prefix_hits == ideal_hits(lines)
    assert outcome.router.overlap_tokens >= outcome.total.prefix_hits, "the router knew, up to a prompt's last token"


def test_a_trace_begins_at_0_and_is_in_the_order_of_time(tmp_path: Path) -> None:
    lines = random_trace(Random(1), 5)
    for line, timestamp in zip(lines, (9000, 7000, 8000, 7000, 12_000), strict=True):
        line["timestamp"] = timestamp
    file = written(tmp_path / "trace.jsonl", lines)
    assert [one.ns // 1_000_000 for one in read_trace(file, PAGE)] == [0, 0, 1000, 2000, 5000]
    assert read_trace(file, PAGE, count=3) == read_trace(file, PAGE)[:3], "the first by time"


def test_no_page_of_a_prompt_that_repeats_a_block_is_there_twice(tmp_path: Path) -> None:
    blocks = [7, 8, 7, 9]
    lines = [
        {"timestamp": 0, "input_length": len(ids) * BLOCK, "output_length": 1, "hash_ids": ids}
        for ids in (blocks, blocks)
    ]
    one, two = (turn.addresses(0, 4 * BLOCK // PAGE) for _, (turn,) in read_trace(written(tmp_path / "t", lines), PAGE))
    assert len({*one}) == len(one)
    assert {*one} & {*two} == {*one[: 2 * BLOCK // PAGE]}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1]}', "600 tokens are 2 blocks"),
        ('{"timestamp": -1, "input_length": 6, "output_length": 5, "hash_ids": [1]}', "a negative time or length"),
        ('{"timestamp": 0, "input_length": 6, "hash_ids": [1]}', "output_length"),
        ('{"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [-1]}', "hash_ids must be from 0"),
        ('{"timestamp": 0, "input_length": 6.5, "output_length": 5, "hash_ids": [1]}', "hash_ids integers"),
        ('{"timestamp": "0", "input_length": 6, "output_length": 5, "hash_ids": [1]}', "must be a number"),
        ('{"timestamp": NaN, "input_length": 6, "output_length": 5, "hash_ids": [1]}', "a negative time"),
        ('{"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": "1"}', "hash_ids integers"),
        ("[1]", "it lacks an object"),
        ("{", "not a request of a trace"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, what: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n' + line)
    with pytest.raises(ValueError, match=rf"trace.jsonl:2: .*{what}"):
        read_trace(file, PAGE)


def test_a_router_tells_the_pages_of_a_block_apart(tmp_path: Path) -> None:
    lines = [{"timestamp": 0, "input_length": BLOCK, "output_length": 1, "hash_ids": [7]}]
    ((_, (turn,)),) = read_trace(written(tmp_path / "trace.jsonl", lines), PAGE)
    index = KVIndex()
    index.add("a")
    index.store("a", [*map(page_hash, turn.addresses(0, 3))])
    assert index.overlap(map(page_hash, turn.addresses(0, 8))) == {"a": 3}
