"""Files of tables of step times."""

import json
from pathlib import Path

import pytest

from oscine.timing.read import read_table
from oscine.timing.table import StepPoint, parse_table

HEADER = {
    **{"model": "m", "layers": 1, "hidden": 8, "gpu": "G", "bytes_per_s": 1.0, "flops_per_s": 1.0, "source": "here"},
    **{"commit": "abc", "colour": "red"},  # the latter is not known
}
POINT = {"kind": "decode", "size": 8, "rows": 8, "context": 100, "ms": 3.5, "mad": 0.1, "watts": 700}


def test_a_table_is_a_header_and_points() -> None:
    header, points = parse_table(map(json.dumps, [HEADER, POINT]), "t.jsonl")
    assert (header.model, header.num_gpus, header.commit) == ("m", 1, "abc")
    assert points == (StepPoint("decode", 3.5, rows=8, context=100, size=8, mad=0.1, watts=700),)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "t.jsonl:1: not a line"),
        ([json.dumps(HEADER), "[]"], "t.jsonl:2: not a line"),
        ([json.dumps(HEADER), '{"kind": "decode"}'], "t.jsonl:2: .*ms"),
        ([json.dumps(HEADER), json.dumps(POINT | {"kind": "prefill"})], "t.jsonl:2: .*'prefill'"),
        ([json.dumps(HEADER), json.dumps(POINT | {"ms": 0})], "t.jsonl:2: .*above 0"),
        ([json.dumps(HEADER), json.dumps(POINT | {"ms": "3.5"})], "t.jsonl:2: .*'str'"),
        ([json.dumps(HEADER), json.dumps(POINT | {"rows": 0})], "t.jsonl:2: .*above 0"),
        ([json.dumps(HEADER), json.dumps(POINT | {"kind": "prompts"})], "t.jsonl:2: .*above 0"),
        ([json.dumps(HEADER), json.dumps(POINT | {"ms": float("inf")})], "t.jsonl:2: .*above 0"),
        ([json.dumps(HEADER), json.dumps(POINT | {"kind": "verify", "drafts": 8})], "t.jsonl:2: .*fewer than rows"),
        ([json.dumps(HEADER), json.dumps(POINT | {"kind": "verify"})], "t.jsonl:2: .*fewer than rows"),
        ([json.dumps(HEADER), json.dumps(POINT | {"drafts": 4})], "t.jsonl:2: .*others have none"),
        ([json.dumps(HEADER), json.dumps(POINT | {"kind": "mixed", "tokens": 8})], "t.jsonl:2: .*hold all rows"),
        ([json.dumps(HEADER), json.dumps(POINT | {"context": -1})], "t.jsonl:2: .*not be negative"),
        ([json.dumps(HEADER | {"decode_graphs": [8, 4]})], "t.jsonl:1: .*ascend"),
        ([json.dumps(HEADER | {"decode_graphs": 8})], "t.jsonl:1: .*iterable"),
        ([json.dumps(HEADER | {"figures": "guessed"})], "t.jsonl:1: .*'guessed'"),
        ([json.dumps(HEADER), json.dumps(POINT), json.dumps(POINT | {"ms": 4.0})], "t.jsonl:3: .*once more"),
        (['{"model": "m"}'], "t.jsonl:1: .*`oscine profile` writes: it has no layers, hidden, gpu, source$"),
        (["[]"], "t.jsonl:1: .*no object"),
        ([json.dumps(HEADER), '{"kind": "decode"}'], "t.jsonl:2: .*it has no ms$"),
        ([json.dumps(HEADER)], "t.jsonl has no step times"),
        ([], "t.jsonl has no step times"),
    ],
)
def test_a_broken_table_is_one_line(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_table(lines, "t.jsonl")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "t.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(
        ValueError, match=r"t\.jsonl: not a table of step times, which `oscine profile` writes: not UTF-8"
    ):
        read_table(path)
