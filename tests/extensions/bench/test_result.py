"""Lines of the result files, and their report beside vLLM's and earlier figures."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from oscine.extensions.bench import anchors, report
from oscine.extensions.bench.result import RESULTS, Layout, Point, Result, append, latest, of_one_gpu, read, results_of
from oscine.extensions.bench.serve import row

RESULT = Result(
    model="120b",
    concurrency=64,
    isl=1024,
    osl=256,
    output_tok_s=2707.5,
    prefill_tok_s=54000.0,
    decode_step_ms=20.0,
    tok_s_user=50.0,
    roofline_share=0.69,
    ready_s=30.0,
    gpu="NVIDIA H200",
    torch="2.11",
    triton="3.6",
    commit="abc",
    date="2026-01-01T00:00:00Z",
)


def test_a_file_of_results_grows_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    newer = replace(RESULT, output_tok_s=3000.0)
    other = replace(RESULT, concurrency=1)
    for result in (RESULT, other, newer):
        append(path, result)
    assert read(path) == [RESULT, other, newer]
    alone = Layout()
    assert latest(read(path)) == {
        ("120b", Point(64, 1024, 256), alone, ("auto", "auto")): newer,
        ("120b", Point(1, 1024, 256), alone, ("auto", "auto")): other,
    }


def test_a_line_has_its_energy_and_first_token_only_where_they_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    counted = replace(RESULT, joules_per_output_token=0.25, watts=690.0, first_token_ms=21.03)
    append(path, RESULT)
    append(path, counted)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert second.keys() - first.keys() == {"joules_per_output_token", "watts", "first_token_ms"}
    assert read(path) == [RESULT, counted]
    assert report.line(counted).split()[-3:] == ["0.25", "690", "21.0"]
    assert report.line(RESULT).split()[-3:] == ["-", "-", "-"]
    assert len(report.HEADER) == len(report.line(RESULT)) == len(report.line(counted))


def test_a_line_without_sizes_is_of_one_gpu_with_exact_keys_and_no_other_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    parallel = ("num_gpus", "tensor_parallel_size", "data_parallel_size", "expert_parallel_size")
    sizes = (*parallel, "kv_cache_dtype", "activation_dtype")
    path.write_text(json.dumps({key: value for key, value in asdict(RESULT).items() if key not in sizes}) + "\n")
    on_two = replace(RESULT, num_gpus=2, tensor_parallel_size=2)
    in_fp8 = replace(RESULT, kv_cache_dtype="fp8")
    rounded = replace(in_fp8, activation_dtype="fp8")
    for result in (on_two, in_fp8, rounded):
        append(path, result)
    assert list(latest(read(path)).values()) == [RESULT, on_two, in_fp8, rounded]
    assert of_one_gpu(read(path)) == [RESULT]


def test_each_device_has_a_file_of_its_own() -> None:
    """So that a laptop's figures never end up in the tables of a GPU."""
    assert results_of("NVIDIA H200") == RESULTS
    names = ("cpu", "NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3")
    assert [results_of(gpu).name for gpu in names] == ["cpu.jsonl", "geforce-rtx-4090.jsonl", "h100-80gb-hbm3.jsonl"]
    assert {results_of(gpu).parent for gpu in names} == {RESULTS.parent}


@pytest.mark.parametrize("text", ["not json", "[]", '{"model": "120b"}', '{"more": 1}'])
def test_a_bad_line_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.jsonl"
    append(path, RESULT)
    path.write_text(path.read_text() + text + "\n")
    with pytest.raises(ValueError, match=r"results\.jsonl:2"):
        read(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"\xff", "codec can't decode byte"),
        (b"[]", "it is no JSON object"),
        (b'{"model": "120b"}', "it lacks concurrency, isl, osl,"),
        (json.dumps({**asdict(RESULT), "more": 1}).encode(), "it has unknown keys: more"),
        (json.dumps({**asdict(RESULT), "osl": "8"}).encode(), "osl must be a positive number, not '8'"),
        (json.dumps({**asdict(RESULT), "tok_s_user": 0}).encode(), "tok_s_user must be a positive number, not 0"),
        (json.dumps({**asdict(RESULT), "model": []}).encode(), "model must be a text, not []"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(json.dumps(asdict(RESULT)).encode() + b"\n" + text + b"\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}:2: not a result: ") + ".*" + re.escape(said)):
        read(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"\xff", "codec can't decode byte"),
        (b"[[1, 2]]", "it is no JSON object"),
        (b'{"a": 1}', "it has no model, output_tput_per_gpu"),
        (b'{"model": "m", "output_tput_per_gpu": "7"}', "output_tput_per_gpu must be a number, at least 0, not '7'"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"model": "m", "output_tput_per_gpu": 7}\n' + text + b"\n")
    with pytest.raises(
        ValueError, match=re.escape(f"{path}:2: not a row of `oscine bench serve`: ") + ".*" + re.escape(said)
    ):
        row.read(path)


@pytest.mark.parametrize("text", ["", "1", "1:2", "1:2:3:4", "a:2:3", "0:2:3", "1:0:3", "1:2:1"])
def test_a_bad_point_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="point"):
        Point.parse(text)


def test_a_line_stands_beside_vllm_and_the_run_before() -> None:
    before = latest([replace(RESULT, output_tok_s=2500.0, commit="def")])
    line = report.line(RESULT, before)
    figures = line.split()
    assert figures[:6] == ["120b", "64", "1024/256", "2,708", "1,805", "1.50"]
    assert figures[6:9] == ["54,000", "45,000", "1.20"]
    assert figures[9:14] == ["20.000", "50.0", "40", "1.25", "69.0%"]
    assert line.endswith("before: out x1.083, user x1.000 (def)")
    assert len(report.HEADER) == len(report.line(RESULT))


def test_a_load_that_nobody_measured_has_no_peer() -> None:
    result = replace(RESULT, isl=2048, roofline_share=None)
    assert report.line(result, {}).split()[4:6] == ["-", "-"]
    assert report.line(result, {}).endswith("-  before: none")


@pytest.mark.parametrize("anchor", [a for a in anchors.ANCHORS if a.system == anchors.VLLM], ids=str)
def test_measured_anchors_agree_with_themselves(anchor: anchors.Anchor) -> None:
    """A user gets one token a step, and all of them together no more than that."""
    assert anchor.decode_step_ms is not None
    assert anchor.tok_s_user == pytest.approx(1e3 / anchor.decode_step_ms, rel=0.02)
    assert anchor.concurrency is not None
    assert anchor.output_tok_s is not None
    assert anchor.output_tok_s < anchor.concurrency * anchor.tok_s_user
    assert anchors.vllm(anchor.model, Point(anchor.concurrency, anchor.isl, anchor.osl)) is anchor
