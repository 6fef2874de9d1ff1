"""Profiles, and the files and command lines of vLLM and TensorRT-LLM for gpt-oss."""

from pathlib import Path

import pytest

from oscine.cli.error import USAGE, CommandError
from oscine.cli.parser import Parser
from oscine.cli.serve.options import ALIASES, OPPOSITES, PROFILE_FOLDER, PROFILES, add_options
from oscine.cli.serve.read_options import read_config
from oscine.extensions.apis.conventions import other_servers as dialects
from oscine.settings.config import OPTIONS, Config

# The files of TensorRT-LLM's gpt-oss guide, by their keys: low latency and max throughput of the first edition, and the
# two that are kept beside the newer one.
LOW_LATENCY = """
cuda_graph_config:
    enable_padding: true
    max_batch_size: 8
enable_attention_dp: false
enable_mixed_sampler: true
moe_config:
    backend: TRTLLM
"""
MAX_THROUGHPUT = """
cuda_graph_config:
    enable_padding: true
    max_batch_size: 640
enable_attention_dp: true
moe_config:
    backend: CUTLASS
stream_interval: 10
"""
NEWER_LATENCY = """
cuda_graph_config: {enable_padding: true, max_batch_size: 720}
enable_attention_dp: false
moe_config: {backend: TRTLLM}
num_postprocess_workers: 4
stream_interval: 20
"""
NEWER_THROUGHPUT = """
attention_dp_config: {batching_wait_iters: 50, enable_balance: true, timeout_iters: 1}
backend: pytorch
cuda_graph_config: {enable_padding: true, max_batch_size: 720}
enable_attention_dp: true
ep_size: GPUS
kv_cache_free_gpu_memory_fraction: 0.9
max_batch_size: 720
max_num_tokens: 16384
moe_config: {backend: CUTLASS}
num_postprocess_workers: 4
print_iter_log: true
stream_interval: 20
tp_size: GPUS
trust_remote_code: true
"""
GUIDE = "openai/gpt-oss-120b --host 0.0.0.0 --port 8000 --backend pytorch --tp_size 1 --ep_size 1 --trust_remote_code"


def config_of(*arguments: str) -> tuple[Config, list[str]]:
    """The configuration, and what was said to have no effect."""
    parser = Parser(prog="oscine serve", allow_abbrev=False)
    add_options(parser)
    notes: list[str] = []
    return read_config(vars(parser.parse_args(arguments)), notes.append), notes


def write(folder: Path, text: str) -> str:
    path = folder / "options.yaml"
    path.write_text(text)
    return str(path)


def test_the_guides_low_latency_command_works_as_written(tmp_path: Path) -> None:
    arguments = (*GUIDE.split(), "--extra_llm_api_options", write(tmp_path, LOW_LATENCY))
    config, notes = config_of(*arguments, "--kv_cache_free_gpu_memory_fraction", "0.75")
    expected, _ = config_of("openai/gpt-oss-120b", "--host", "0.0.0.0", "--kv-cache-free-gpu-memory-fraction", "0.75")
    assert config == expected
    assert [note.partition(" ")[0] for note in notes] == [
        *("cuda_graph_config.enable_padding", "cuda_graph_config.max_batch_size", "enable_mixed_sampler"),
        *("moe_config.backend", "trust_remote_code"),
    ]


def test_the_guides_max_throughput_command_works_as_written(tmp_path: Path) -> None:
    arguments = (*GUIDE.split(), "--max_batch_size", "640", "--extra_llm_api_options", write(tmp_path, MAX_THROUGHPUT))
    config, notes = config_of(*arguments, "--kv_cache_free_gpu_memory_fraction", "0.9")
    assert config.engine.scheduler.max_num_seqs == 640
    assert config.engine.scheduler.stream_interval == 10
    assert config.engine.cache.kv_cache_free_gpu_memory_fraction == 0.9
    assert (config.server.data_parallel_size, config.server.enable_expert_parallel) == (1, False)
    assert not any(note.startswith("enable_attention_dp") for note in notes)


def test_the_newer_files_work_on_one_gpu(tmp_path: Path) -> None:
    config, _ = config_of("m", "--config", write(tmp_path, NEWER_LATENCY))
    assert config.engine.scheduler.stream_interval == 20
    config, _ = config_of("m", "--extra-llm-api-options", write(tmp_path, NEWER_THROUGHPUT.replace("GPUS", "1")))
    scheduler = config.engine.scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.stream_interval) == (720, 16384, 20)


@pytest.mark.parametrize(
    "name", ["--tp_size", "--tp-size", "--tp", "-tp", "--tensor-parallel-size", "--tensor_parallel_size"]
)
def test_tensor_parallelism_goes_by_all_names(name: str) -> None:
    assert config_of("m", name, "8")[0].engine.model.tensor_parallel_size == 8
    with pytest.raises(CommandError, match="it must be at least 1, not 0"):
        config_of("m", name, "0")


def test_attention_data_parallelism_is_engines_that_share_experts(tmp_path: Path) -> None:
    path = write(tmp_path, NEWER_THROUGHPUT.replace("GPUS", "8"))
    config, notes = config_of("m", "--config", path)
    assert (
        config
        == config_of(
            *("m", "--data-parallel-size", "8", "--enable-expert-parallel", "--max-num-seqs", "720"),
            *("--max-num-batched-tokens", "16384", "--stream-interval", "20"),
            *("--kv-cache-free-gpu-memory-fraction", "0.9"),
        )[0]
    )
    assert any(note.startswith("ep_size has no effect: every rank has a part of each expert") for note in notes)
    assert config_of("m", "--tp", "8", "--dp", "8", "--enable-dp-attention", "--ep", "8")[0].server == config.server
    assert config_of("m", "--config", path, "--no-enable-attention-dp")[0].engine.model.tensor_parallel_size == 8


def test_experts_of_one_engine_are_not_shared() -> None:
    config, notes = config_of("m", "--tensor-parallel-size", "2", "--enable-expert-parallel", "--device", "cpu")
    assert any(note.startswith("--enable-expert-parallel has no effect with one engine") for note in notes)
    assert config.engine.model.tensor_parallel_size == 2


def test_an_engine_of_attention_data_parallelism_has_one_rank() -> None:
    with pytest.raises(CommandError, match=r"--data-parallel-size must be the number of ranks \(8\), not 4"):
        config_of("m", "--tp", "8", "--dp", "4", "--enable-dp-attention")


def test_vllms_command_for_shared_experts_works_as_written() -> None:
    server = config_of("m", "--data-parallel-size", "2", "--enable-expert-parallel")[0].server
    assert (server.data_parallel_size, server.enable_expert_parallel) == (2, True)


def test_a_vllm_command_works_as_written() -> None:
    config, notes = config_of(
        *("openai/gpt-oss-20b", "--tensor-parallel-size", "1", "--gpu-memory-utilization", "0.9", "--max-model-len"),
        *("26384", "--max-num-seqs", "128", "--max-num-batched-tokens", "8192", "--async-scheduling"),
        *("--no-enable-prefix-caching", "--kv-cache-dtype", "auto", "--tool-call-parser", "openai"),
        *("--enable-auto-tool-choice", "--served-model-name", "gpt-oss", "--enforce-eager"),
    )
    expected, _ = config_of(
        *("openai/gpt-oss-20b", "--gpu-memory-utilization", "0.9", "--max-model-len", "26384", "--max-num-seqs", "128"),
        *("--max-num-batched-tokens", "8192", "--no-prefix-caching", "--served-model-name", "gpt-oss"),
        "--enforce-eager",
    )
    assert config == expected
    assert [note.partition(" ")[0] for note in notes] == ["tool_call_parser", "enable_auto_tool_choice"]


# vLLM's recipe for gpt-oss on Hopper.
HOPPER = """
no-enable-prefix-caching: true
max-cudagraph-capture-size: 2048
max-num-batched-tokens: 8192
stream-interval: 20
"""


def test_vllms_recipe_works_as_written(tmp_path: Path) -> None:
    config, notes = config_of("openai/gpt-oss-120b", "--config", write(tmp_path, HOPPER), "--tensor-parallel-size", "1")
    expected = ("--no-prefix-caching", "--max-num-batched-tokens", "8192", "--stream-interval", "20")
    assert config == config_of("openai/gpt-oss-120b", *expected)[0]
    assert [note.partition(" ")[0] for note in notes] == ["max_cudagraph_capture_size"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("kv-cache-dtype: fp8_e5m2", "kv-cache-dtype must be auto, fp8 or fp8_e4m3, not 'fp8_e5m2'"),
    ],
)
def test_vllms_other_recipes_are_refused_with_the_reason(tmp_path: Path, line: str, named: str) -> None:
    with pytest.raises(CommandError, match=named):
        config_of("m", "--config", write(tmp_path, f"{HOPPER}{line}"))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--model gpt-oss-20b -tp 1 -pp 1 -dp 1 --api-server-count 1 --disable-log-requests", "gpt-oss-20b"),
        (
            'm --allowed-origins ["https://a.example","https://b.example"]',
            "m --cors-origins https://a.example https://b.example",
        ),
        ("m --kv-cache-memory-bytes 4G --no-enforce-eager -O 3 -q mxfp4", "m --kv-cache-bytes 4294967296"),
        ("m --cudagraph-capture-sizes 1 2 4 --no-disable-log-requests --load-format safetensors", "m"),
        (
            "m --enable-chunked-prefill --swap-space 0 --disable-log-stats --uvicorn-log-level info",
            "m --log-level info",
        ),
        ("m --guided-decoding-backend xgrammar --max-log-len 10 --distributed-executor-backend mp", "m"),
        (
            "--model-path m --tp 2 --context-length 8192 --mem-fraction-static 0.85",
            "m --tensor-parallel-size 2 --max-model-len 8192 --gpu-memory-utilization 0.85",
        ),
        (
            "--model-path m --random-seed 7 --max-running-requests 9 --max-queued-requests 8",
            "m --seed 7 --max-num-seqs 9 --max-waiting 8",
        ),
        ("--model-path m --disable-radix-cache --disable-cuda-graph", "m --no-prefix-caching --enforce-eager"),
        (
            "--model-path m --disable-overlap-schedule --watchdog-timeout 60",
            "m --no-async-scheduling --engine-timeout 60",
        ),
        (
            "--model-path m --tokenizer-path t --chunked-prefill-size 4096",
            "m --tokenizer t --max-num-batched-tokens 4096",
        ),
        ("--model-path m --attention-backend fa3 --cuda-graph-max-bs 64 --reasoning-parser gpt-oss", "m"),
        ("--model-path m --schedule-policy lpm --enable-metrics --trust-remote-code --dp 1 --ep 1", "m"),
    ],
)
def test_usual_command_lines_of_vllm_and_sglang(theirs: str, ours: str) -> None:
    assert config_of(*theirs.split())[0] == config_of(*ours.split())[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--tool-server demo", "--tool-server: it is refused: name built-in tools with --tools"),
        ("--chat-template x.jinja", "no template changes it"),
        ("--api-server-count 4", "it must be 1, not 4: a second API process"),
        ("--load-format gguf", "--load-format: it must be auto, .* or dummy, not gguf"),
        ("--speculative-algorithm EAGLE3", "say it with --speculative-config"),
        ("--max-total-tokens 1000", "see --kv-cache-bytes"),
        ("-pp 8", "--pipeline-parallel-size/-pp: it must be 1, not 8: pipeline parallelism is not available yet"),
        ("--allowed-origins [", "--allowed-origins: it must be .* or a JSON list of them, not"),
    ],
)
def test_what_is_refused_has_a_reason(arguments: str, said: str) -> None:
    with pytest.raises(CommandError, match=said) as caught:
        config_of("m", *arguments.split())
    assert caught.value.status == USAGE


def test_a_refused_flag_may_be_false_in_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, "enable-lora: false\nmodel_path: m\ntokenizer_path: t")
    assert config_of("--config", path)[0] == config_of("m", "--tokenizer", "t")[0]


@pytest.mark.parametrize(
    ("model", "shapes"),
    [("openai/gpt-oss-20b", "20b"), ("gpt-oss-120b", "120b"), ("a-folder", "a-folder")],
)
def test_dummy_weights_are_random_ones_under_the_models_name(model: str, shapes: str) -> None:
    config, _ = config_of(model, "--load-format", "dummy")
    assert config == config_of("--random-weights", shapes, "--served-model-name", model)[0]
    named, _ = config_of(model, "--load-format", "dummy", "--served-model-name", "x", "--revision", "main")
    assert named.server.served_model_names == ("x",)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("kv_cache_config: {enable_block_reuse: false}", ["--no-prefix-caching"]),
        ("kv_cache_config: {enable_block_reuse: true, dtype: auto, max_tokens: null}", []),
        ("kv_cache_config: {dtype: fp8}", ["--kv-cache-dtype", "fp8"]),
        ("kv_cache_config: {free_gpu_memory_fraction: 0.5}", ["--kv-cache-free-gpu-memory-fraction", "0.5"]),
        ("kv_cache_config:", []),
        ("cuda_graph_config:", ["--enforce-eager"]),
        ("cuda_graph_config: {batch_sizes: [1, 2, 4]}", []),
        ("disable_overlap_scheduler: true", ["--no-async-scheduling"]),
        ("disable_overlap_scheduler: false", []),
        ("tp_size: 4", ["--tensor-parallel-size", "4"]),
        ("tensor_parallel_size: 4", ["--tensor-parallel-size", "4"]),
        ("async-scheduling: false", ["--no-async-scheduling"]),
        ("enable_prefix_caching: false", ["--no-prefix-caching"]),
        ("max_seq_len: 4096", ["--max-model-len", "4096"]),
        ("speculative_config: null", []),
        ("profile: low_latency", ["--profile", "low_latency"]),
    ],
)
def test_a_file_means_the_same_as_our_options(tmp_path: Path, text: str, same: list[str]) -> None:
    assert config_of("m", "--config", write(tmp_path, text))[0] == config_of("m", *same)[0]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("moe_config: {kernel: fast}", "unknown key 'moe_config.kernel'"),
        ("moe_conf: {backend: TRTLLM}", "unknown key 'moe_conf'"),
        ("moe_config: TRTLLM", "moe_config must be a mapping"),
        ("enable_attention_dp: 1", "enable_attention_dp must be true or false, not 1"),
        ("kv_cache_config: {dtype: nvfp4}", "kv_cache_config.dtype must be auto, fp8 or fp8_e4m3, not 'nvfp4'"),
        ("kv_cache_config: {max_tokens: 9}", "kv_cache_config.max_tokens is refused: .* is not available yet"),
        ("speculative_config: {decoding_type: MTP}", "decoding_type must be eagle3, ngram, auto or none, not 'MTP'"),
        ("max_batch_size: many", "max_batch_size must be a whole number, not 'many'"),
        ("profile: fast", "profile must be low_latency or max_throughput, not 'fast'"),
    ],
)
def test_what_a_file_cannot_say_names_key_and_file(tmp_path: Path, text: str, named: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(CommandError, match=rf"--config {path}: .*{named}") as caught:
        config_of("m", "--config", path)
    assert caught.value.status == USAGE


def test_the_profiles_of_the_package() -> None:
    latency, throughput = (config_of("--profile", name)[0].engine.scheduler for name in PROFILES)
    assert (latency.max_num_seqs, latency.max_num_batched_tokens, latency.stream_interval) == (16, 2048, 1)
    assert (throughput.max_num_seqs, throughput.max_num_batched_tokens) == (1024, 16384)
    assert throughput.stream_interval > 1
    assert {path.stem for path in PROFILE_FOLDER.glob("*.yaml")} == set(PROFILES)


def test_command_line_over_file_over_profile_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "max_num_seqs: 200\nstream_interval: 5\nprofile: low_latency")
    arguments = ("m", "--config", path, "--profile", "max_throughput", "--stream-interval", "3")
    scheduler = config_of(*arguments)[0].engine.scheduler
    assert scheduler.stream_interval == 3
    assert scheduler.max_num_seqs == 200
    assert scheduler.max_num_batched_tokens == 16384, "of the command line's profile"
    assert config_of(*arguments)[0].engine.cache == Config().engine.cache


def test_the_command_line_undoes_a_flag_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "no-prefix-caching: true\nno-async-scheduling: true")
    config, _ = config_of("m", "--config", path, "--enable-prefix-caching", "--async-scheduling")
    assert config == config_of("m")[0]


@pytest.mark.parametrize("text", ["gpu_memory_utilization: 0.5", "kv_cache_bytes: 1000000000"])
def test_of_two_sizes_of_the_cache_the_command_lines_stands_alone(tmp_path: Path, text: str) -> None:
    """Whichever is in the file: it neither wins nor has a part."""
    fraction = ("--kv-cache-free-gpu-memory-fraction", "0.75")
    assert config_of("--config", write(tmp_path, text), *fraction) == config_of(*fraction)
    option = f"--{text.replace(':', '')}".split()
    path = write(tmp_path, "kv_cache_config: {free_gpu_memory_fraction: 0.75}")
    assert config_of("--config", path, *option) == config_of(*option)


def test_two_sizes_of_the_cache_in_one_place_exclude_each_other(tmp_path: Path) -> None:
    said = "--gpu-memory-utilization and --kv-cache-free-gpu-memory-fraction exclude each other"
    with pytest.raises(CommandError, match=said):
        config_of("--gpu-memory-utilization", "0.5", "--kv_cache_free_gpu_memory_fraction", "0.5")
    path = write(tmp_path, "kv_cache_config: {free_gpu_memory_fraction: 0.75}\ngpu-memory-utilization: 0.5")
    with pytest.raises(CommandError, match=rf"--config {path}: {said}") as caught:
        config_of("--config", path)
    assert caught.value.status == USAGE
    config, _ = config_of("--gpu-memory-utilization", "0.5", "--kv-cache-bytes", "1000000000")
    assert (config.engine.cache.gpu_memory_utilization, config.engine.cache.kv_cache_bytes) == (0.5, 10**9)


def test_underscores_are_of_names_only() -> None:
    config, _ = config_of("--served_model_name=a_b", "c_d")
    assert config.server.served_model_names == ("a_b",)
    assert config.engine.model.model == "c_d"


def test_no_name_means_two_things() -> None:
    kinds = (OPTIONS.keys(), ALIASES.keys(), OPPOSITES.keys(), dialects.NAMES)
    assert len(set().union(*kinds)) == sum(map(len, kinds))
