"""Steps composed of times of ops: sums by hand, chunks, what is beyond the tables, and the reader of wheels."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from oscine.extensions.plan.foreign.compose import MODELS, ComposedSurface, GpuLayout, Rest, composed_table
from oscine.extensions.plan.foreign.known import FILE, fitted_of, read_fitted, step_table, tables_of, write_fitted
from oscine.extensions.plan.foreign.ops import DATA, OpTable, parse_ops, shipped_ops, write_ops
from oscine.timing.answer import NotMeasuredError
from oscine.timing.features import StepFeatures, pairs_of

NAMES = [f"{one.header.system} {one.header.framework}" for one in shipped_ops()]
# With experts on one GPU. TensorRT-LLM on 80 GB has none.
ALONE = [
    pytest.param(one, id=name)
    for one, name in zip(shipped_ops(), NAMES, strict=True)
    if one.curve("experts", experts=128, tp=1, ep=1) is not None
]
NO_REST = Rest(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def us(table: OpTable, op: str, x: int, **key: Any) -> float:
    """A time as it stands in the file."""
    (row,) = (one for one in table.curves if one.op == op and one.key == key)
    return row.us[row.x.index(x)]


@pytest.mark.parametrize("table", shipped_ops(), ids=NAMES)
def test_shipped_tables_say_where_they_come_from(table: OpTable) -> None:
    header = table.header
    assert "Apache-2.0" in header.licence
    assert len(header.sha256) == 64
    assert header.bytes_per_s > 1e12
    assert {one.op for one in table.curves} == {"gemm", "experts", "decode", "prefill", "sum"}


def test_the_data_is_small() -> None:
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 1_500_000


@pytest.mark.parametrize("table", ALONE)
def test_a_decode_step_is_the_sum_of_its_ops(table: OpTable) -> None:
    step = StepFeatures(64, 64 * 1024, sampled=64)
    gemms = sum(us(table, "gemm", 64, name=name, tp=1) for name in ("qkv", "output", "router"))
    own = {"heads": 64, "kv": "bfloat16", "batch": 64}
    full, window = (us(table, "decode", x, window=window, **own) for x, window in ((1024, 0), (128, 128)))
    layer = gemms + us(table, "experts", 64, experts=128, tp=1, ep=1) + (full + window) / 2
    expected = (36 * layer + us(table, "gemm", 64, name="head", tp=1)) / 1e6
    assert composed_table([table], "120b", GpuLayout(), NO_REST).step_s(step) == pytest.approx(expected, rel=0.03)


def test_ranks_add_sums_over_them() -> None:
    table, step = tables_of("h200_sxm", "vllm")[0], StepFeatures(64, 64 * 1024, sampled=64)
    two = ComposedSurface([table], MODELS["120b"], GpuLayout(2, 2, 2, 1), NO_REST)
    gemms = sum(us(table, "gemm", 64, name=name, tp=tp) for name, tp in (("qkv", 2), ("output", 2), ("router", 1)))
    own = {"heads": 32, "kv": "bfloat16", "batch": 64}
    full, window = (us(table, "decode", x, window=window, **own) for x, window in ((1024, 0), (128, 128)))
    sums = table.curve("sum", gpus=2)
    assert sums is not None
    layer = gemms + us(table, "experts", 64, experts=128, tp=2, ep=1) + (full + window) / 2
    layer += 2 * sums.value(64 * 2880 * 2)
    expected = (36 * layer + us(table, "gemm", 64, name="head", tp=2)) / 1e6
    assert two.cell(step).step_s(step.decode_context) == pytest.approx(expected, rel=0.02)


def test_engines_that_share_experts_exchange_tokens_instead_of_one_sum() -> None:
    """Each engine has half of the rows. All tokens meet at the experts, which is one sum over all ranks."""
    table = tables_of("b200_sxm", "trtllm")[0]
    rest, layouts = NO_REST._replace(exchange_s=1e-3), (GpuLayout(2, 2, 1, 2), GpuLayout(2, 1, 1, 2))
    ranks, engines = (ComposedSurface([table], MODELS["120b"], one, rest) for one in layouts)
    step = StepFeatures(32, 32 * 1024, sampled=32)
    own = {"kv": "bfloat16", "batch": 32, "heads": 64}
    full, window = (us(table, "decode", x, window=window, **own) for x, window in ((1024, 0), (128, 128)))
    sums = table.curve("sum", gpus=2)
    assert sums is not None
    layer = sum(us(table, "gemm", 32, name=name, tp=1) for name in ("qkv", "output", "router"))
    layer += us(table, "experts", 64, experts=128, tp=1, ep=2) + (full + window) / 2 + sums.value(64 * 2880 * 2)
    expected = (36 * layer + us(table, "gemm", 32, name="head", tp=1)) / 1e6 + rest.exchange_s
    assert engines.cell(step).step_s(step.decode_context) == pytest.approx(expected, rel=0.01)
    assert [one.parts(step).exchange for one in (ranks, engines)] == [0.0, 1.0]


def test_a_later_chunk_takes_what_the_whole_takes_more() -> None:
    table = composed_table(tables_of("h200_sxm", "vllm"), "120b", GpuLayout(), NO_REST)
    ops = tables_of("h200_sxm", "vllm")[0]

    def took_s(start: int, tokens: int) -> float:
        return table.step_s(StepFeatures(0, 0, tokens, pairs_of(start, tokens), 1, 1))

    whole, part = (us(ops, "prefill", n, heads=64, window=0, batch=1) for n in (8192, 4096))
    assert took_s(4096, 4096) - took_s(0, 4096) == pytest.approx(18 * (whole - 2 * part) / 1e6, rel=0.01)


@pytest.mark.parametrize("table", ALONE)
def test_more_work_takes_no_less(table: OpTable) -> None:
    steps = composed_table([table], "120b", GpuLayout(), NO_REST, scaled=True)

    def took_s(rows: int, context: int, tokens: int) -> float:
        chunk = (tokens, pairs_of(0, tokens), 1, rows + 1) if tokens else (0, 0, 0, rows)
        return steps.step_s(StepFeatures(rows, rows * context, *chunk))

    for rows in (1, 7, 64, 300, 1500):
        for context in (100, 1500, 50_000):
            for tokens in (0, 300, 5000):
                least = took_s(rows, context, tokens)
                assert least <= took_s(rows, context + 40, tokens) + 1e-12
                assert least <= took_s(rows, context, tokens + 600) + 1e-12


def test_a_cell_is_linear_up_to_its_last_context() -> None:
    table = step_table("gb200", "trtllm", "120b", GpuLayout(), scaled=True)
    step = StepFeatures(100, 100 * 700, 400, pairs_of(0, 400), 1, 101)
    cell = table.cell(step)
    for context in (step.decode_context, cell.last_context):
        assert table.step_s(step._replace(decode_context=context)) == pytest.approx(cell.step_s(context))
    assert cell.figures == "composed"


def test_beyond_the_tables_attention_is_scaled_or_refused() -> None:
    step = StepFeatures(512, 512 * 4096, sampled=512)
    with pytest.raises(NotMeasuredError, match="times as many tokens"):
        step_table("gb200", "trtllm", "120b", GpuLayout()).step_s(step)
    cell = step_table("gb200", "trtllm", "120b", GpuLayout(), scaled=True).cell(step)
    assert cell.figures == "scaled"
    assert cell.factor == pytest.approx(512 * 4096 / (512 * 256), rel=0.01)


def test_what_no_table_has_is_refused() -> None:
    with pytest.raises(NotMeasuredError, match="16 GPUs"):
        step_table("gb200", "trtllm", "120b", GpuLayout(16, 8, 1, 16))
    with pytest.raises(NotMeasuredError, match="64 heads with int8 keys"):
        step_table("gb200", "trtllm", "120b", GpuLayout(), kv="int8")
    with pytest.raises(NotMeasuredError, match="not of 7b"):
        step_table("gb200", "trtllm", "7b", GpuLayout())
    with pytest.raises(NotMeasuredError, match="no times of ops of tpu"):
        tables_of("tpu", "vllm")
    with pytest.raises(NotMeasuredError, match="nothing was fitted"):
        fitted_of("tpu", "vllm")


def test_hardware_without_measurements_has_the_figures_of_similar_hardware() -> None:
    assert fitted_of("gb300", "trtllm")[1] == "b200_sxm with trtllm"
    assert fitted_of("h100_sxm", "sglang")[1] == "h100_sxm with vllm"
    assert fitted_of("h100_sxm", "vllm")[0].rest.exchange_s == fitted_of("b200_sxm", "trtllm")[0].rest.exchange_s > 0
    assert tables_of("b200_sxm", "vllm")[0].header.activations == "w4a8_mxfp4_mxfp8"


def test_a_table_says_whose_exchange_it_has() -> None:
    def source(system: str, framework: str, layout: GpuLayout) -> str:
        return step_table(system, framework, "120b", layout).header.source

    sharing, borrowed = GpuLayout(2, 1, 1, 2), "the exchange between engines that share experts is that of b200_sxm"
    assert source("gb200", "trtllm", sharing).endswith(f"; {borrowed} with trtllm")
    assert source("h200_sxm", "trtllm", sharing).endswith(f"; {borrowed} with trtllm")
    assert borrowed not in source("b200_sxm", "trtllm", sharing)
    assert borrowed not in source("gb200", "trtllm", GpuLayout(2, 2, 2, 1))


def test_files_are_read_back(tmp_path: Path) -> None:
    table = shipped_ops()[0]
    write_ops(tmp_path / "ops.jsonl", table)
    again = parse_ops((tmp_path / "ops.jsonl").read_text().splitlines(), "ops")
    assert (again.header.gpu, again.curves) == (table.header.gpu, table.curves)
    found = read_fitted(FILE)
    write_fitted(tmp_path / "fitted.json", found)
    assert read_fitted(tmp_path / "fitted.json") == found
    header = (tmp_path / "ops.jsonl").read_text().splitlines()[0]
    with pytest.raises(ValueError, match=r"^ops:2: .*equal length"):
        parse_ops([header, '{"op": "sum", "gpus": 2, "x": [1, 2], "us": [1]}'], "ops")
    with pytest.raises(ValueError, match=r"^ops has no times"):
        parse_ops([header], "ops")


def test_a_wheel_is_reduced(tmp_path: Path) -> None:
    """Rows made by a law, as the wheel has them; a version that reuses rows of another."""
    pyarrow = pytest.importorskip("pyarrow")
    from oscine.extensions.plan.foreign.reduce import reduced
    from oscine.extensions.plan.foreign.wheel import Wheel

    path = tmp_path / "tables.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in made_wheel(pyarrow).items():
            wheel.writestr(f"aisimulate_core/systems/{name}", content)
    table = reduced(Wheel(path), "h9", "vllm", "2.0")
    assert (table.header.memory_bytes, table.header.activations) == (80, "w4a16_mxfp4")
    qkv = table.curve("gemm", name="qkv", tp=1)
    assert qkv is not None
    assert qkv.value(64) == pytest.approx(64 * 5120 * 2880 / 1e6, rel=1e-3)
    assert us(table, "decode", 129, heads=64, window=0, kv="bfloat16", batch=1) == 129
    assert us(table, "sum", 1024, gpus=2) == 2.0
    with pytest.raises(ValueError, match="--system h8: the wheel has h9"):
        reduced(Wheel(path), "h8", "vllm", "2.0")
    with pytest.raises(ValueError, match="no experts and attention of gpt-oss for trtllm"):
        reduced(Wheel(path), "h9", "trtllm", "2.0")
    damaged = {"h9.yaml": "gpu: {}", "data/h9/moe/vllm/2.0/moe_perf.parquet": b"no parquet"}
    for name, content in damaged.items():
        with zipfile.ZipFile(path, "w") as wheel:
            for other, good in made_wheel(pyarrow).items():
                wheel.writestr(f"aisimulate_core/systems/{other}", content if other == name else good)
        with pytest.raises(ValueError, match=f"{name} is damaged: ") as error:
            reduced(Wheel(path), "h9", "vllm", "2.0")
        assert "\n" not in str(error.value)
    (tmp_path / "text.whl").write_text("no zip")
    with pytest.raises(ValueError, match="is no wheel"):
        Wheel(tmp_path / "text.whl")


def made_wheel(pyarrow: Any) -> dict[str, str | bytes]:
    import pyarrow.parquet as parquet

    def table(*rows: dict[str, Any]) -> bytes:
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), sink)
        return bytes(sink.getvalue())

    def gemm(m: int, n: int, k: int) -> dict[str, Any]:
        return {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": m * n * k / 1e9}

    experts = {"moe_dtype": "w4a16_mxfp4", "hidden_size": 2880, "num_experts": 128, "distribution": "power_law_1.01"}
    heads = {"num_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "kv_cache_dtype": "bfloat16", "device": "H9"}
    decode = {**heads, "batch_size": 1, "isl": 1, "window_size": 0}
    attention = "data/h9/attention/vllm"
    sizes, grid = (1, 64, 16384), (32, 128, 512, 2048, 2560, 3072, 8192, 65536)
    gemms = [gemm(m, n, k) for m in sizes for n in grid for k in grid]
    system = {
        "gpu": {"mem_bw": 1, "mem_capacity": 80, "bfloat16_tc_flops": 1, "power": 1},
        "node": {"num_gpus_per_node": 8, "intra_node_bw": 1},
    }
    reuse = {"reuse": [{"table": "generation_attention_perf", "from_version": "1.0"}]}
    return {
        "h9.yaml": json.dumps(system),  # JSON is YAML
        "data/h9/gemm/vllm/1.0/gemm_perf.parquet": table(*gemms),
        "data/h9/moe/vllm/2.0/moe_perf.parquet": table(
            {**experts, "num_tokens": 8, "moe_tp_size": 1, "moe_ep_size": 1, "latency": 0.1}
        ),
        f"{attention}/2.0/generation_attention_perf.parquet": table({**decode, "step": 64, "latency": 0.065}),
        f"{attention}/1.0/generation_attention_perf.parquet": table({**decode, "step": 128, "latency": 0.129}),
        f"{attention}/2.0/reuse.yaml": json.dumps(reuse),
        f"{attention}/2.0/context_attention_perf.parquet": table({**decode, "isl": 64, "latency": 0.1}),
        "data/h9/comm/vllm/2.0/custom_allreduce_perf.parquet": table(
            {"num_gpus": 2, "message_size": 1024, "latency": 0.002, "backend": "vllm_graph"},
            {"num_gpus": 2, "message_size": 1024, "latency": 0.02, "backend": "vllm_eager"},
        ),
    }
