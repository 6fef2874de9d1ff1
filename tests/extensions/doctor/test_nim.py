"""NIM's variables as options, and NIM's commands."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from oscine.checkpoint import hub
from oscine.cli.error import CommandError
from oscine.cli.serve.read_options import read_config
from oscine.extensions.apis.conventions.profiles import PROFILES
from oscine.extensions.doctor import nim as nim_command
from oscine.extensions.doctor.facts import Facts, GpuFacts
from oscine.settings.config import Config

GIB = 1 << 30
H200 = GpuFacts("NVIDIA H200", 141 * GIB, 140 * GIB, "9.0", "570.1")
THROUGHPUT = next(p for p in PROFILES if (p.model, p.engines) == ("gpt-oss-120b", 4))


def facts(*gpus: GpuFacts, available: int = 32 * GIB) -> Facts:
    return Facts(
        *("Linux", "3.12.0", "0.1.0", "unknown", "a processor", ("avx2",), 8, 64 * GIB),
        *(available, gpus, len(gpus), "/usr/bin/cc", {"/cache": 100 * GIB}, {"torch": "2.13.0"}),
    )


def read(given: dict[str, Any] | None = None, num_gpus: int = 8, **variables: str) -> tuple[Config, list[str]]:
    notes: list[str] = []
    return read_config(given or {}, notes.append, num_gpus, variables), notes


def test_every_variable_sets_its_option() -> None:
    config, notes = read(
        NIM_MODEL_PATH="hf://openai/gpt-oss-20b",
        NIM_SERVED_MODEL_NAME="a,b",
        NIM_SERVER_PORT="9000",
        NIM_CACHE_PATH="/opt/nim/.cache",
        NIM_MAX_MODEL_LEN="32768",
        NIM_MAX_NUM_SEQS="16",
        NIM_TENSOR_PARALLEL_SIZE="2",
        NIM_GPU_MEM_FRACTION="0.5",
        NIM_DISABLE_CUDA_GRAPH="true",
        NIM_LOG_LEVEL="WARNING",
        NIM_JSONL_LOGGING="1",
        NIM_CORS_ALLOW_ORIGINS="https://a.example, https://b.example",
        NIM_SSL_MODE="tls",
        NIM_SSL_CERTS_PATH="cert.pem",
        NIM_SSL_KEY_PATH="key.pem",
        NIM_PIPELINE_PARALLEL_SIZE="1",
        NIM_RELAX_MEM_CONSTRAINTS="1",
    )
    model, server, scheduler = config.engine.model, config.server, config.engine.scheduler
    assert (model.model, model.download_dir, model.max_model_len) == ("openai/gpt-oss-20b", "/opt/nim/.cache", 32768)
    assert (model.tensor_parallel_size, scheduler.max_num_seqs, config.engine.cuda_graphs) == (2, 16, False)
    assert config.engine.cache.gpu_memory_utilization == 0.5
    assert (server.served_model_names, server.port, server.log_level) == (("a", "b"), 9000, "warning")
    assert (server.log_format, server.ssl_certfile, server.ssl_keyfile) == ("json", "cert.pem", "key.pem")
    assert server.cors_origins == ("https://a.example", "https://b.example")
    assert "NIM_SERVER_PORT sets --port" in notes
    assert "NIM_RELAX_MEM_CONSTRAINTS has no effect" in notes


def test_the_command_line_wins_then_passed_arguments_then_variables_then_files(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("port: 1\nmax_num_seqs: 2\nmax_waiting: 3\nmax_model_len: 4\n")
    config, _ = read(
        {"config": path, "port": 10},
        NIM_PASSTHROUGH_ARGS="--port 20 --max-num-seqs 21",
        NIM_SERVER_PORT="30",
        NIM_MAX_NUM_SEQS="31",
        NIM_MAX_MODEL_LEN="32",
    )
    assert (config.server.port, config.engine.scheduler.max_num_seqs) == (10, 21)
    assert (config.engine.model.max_model_len, config.engine.scheduler.max_waiting) == (32, 3)


@pytest.mark.parametrize("wanted", [THROUGHPUT.id, "oscine-mxfp4-tp1-dp4"])
def test_a_profile_sets_model_and_layout(wanted: str) -> None:
    model = {} if wanted == THROUGHPUT.id else {"model": "gpt-oss-120b"}
    config, _ = read(model, NIM_MODEL_PROFILE=wanted)
    assert (config.engine.model.model, config.server.data_parallel_size) == ("gpt-oss-120b", 4)
    assert config.engine.scheduler.max_num_seqs == 1024  # as --profile max_throughput has it
    config, _ = read({**model, "data-parallel-size": 2}, NIM_MODEL_PROFILE=wanted)
    assert config.server.data_parallel_size == 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NIM_SERVER_PORT": "many"}, "NIM_SERVER_PORT must be a whole number"),
        ({"NIM_MODEL_PATH": "ngc://org/model"}, "NIM_MODEL_PATH must be hf://owner/name or a folder"),
        ({"NIM_SSL_MODE": "mtls"}, "NIM_SSL_MODE must be disabled or tls, not 'mtls'"),
        ({"NIM_PIPELINE_PARALLEL_SIZE": "2"}, "NIM_PIPELINE_PARALLEL_SIZE must be 1, not 2"),
        ({"NIM_MODEL_PROFILE": "0123"}, "NIM_MODEL_PROFILE '0123' is no id of a model profile"),
        ({"NIM_PASSTHROUGH_ARGS": "--prot 1"}, "unrecognized arguments: --prot"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_variable(variables: dict[str, str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        read(**variables)


def listed(text: str) -> tuple[set[str], set[str]]:
    """Ids of the profiles that run here, and of those that do not."""
    runnable, incompatible = text.split("- Incompatible with system:")
    return tuple({p.id for p in PROFILES if p.id in part} for part in (runnable, incompatible))  # type: ignore[return-value]


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_profiles_are_listed_by_whether_they_run(
    num_gpus: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nim_command, "gather", lambda: facts(*[H200] * num_gpus))
    nim_command.run_list(argparse.Namespace())
    runnable, incompatible = listed(capsys.readouterr().out)
    expected = {p.id for p in PROFILES if p.num_gpus <= max(num_gpus, 1)}
    if not num_gpus:  # 120b does not fit 32 GiB of host memory
        expected -= {p.id for p in PROFILES if p.model == "gpt-oss-120b"}
    assert runnable == expected
    assert incompatible == {p.id for p in PROFILES} - expected


def test_models_are_downloaded_into_the_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str | None]] = []

    def find_model(options: Any) -> Path:
        asked.append((options.model, options.download_dir))
        return Path("folder")

    monkeypatch.setattr(hub, "find_model", find_model)
    monkeypatch.setenv("NIM_CACHE_PATH", "/opt/nim/.cache")
    for arguments, models in (
        ({"profiles": [THROUGHPUT.id], "all": False}, ["gpt-oss-120b"]),
        ({"profiles": [], "all": True}, ["gpt-oss-20b", "gpt-oss-120b"]),
    ):
        asked.clear()
        nim_command.run_download(argparse.Namespace(**arguments))
        assert asked == [(model, "/opt/nim/.cache") for model in models]
    with pytest.raises(CommandError, match="name a profile"):
        nim_command.run_download(argparse.Namespace(profiles=[], all=False))
    monkeypatch.setenv("NIM_MODEL_PATH", "hf://owner/name")
    nim_command.run_download(argparse.Namespace(profiles=[], all=False))
    assert asked[-1][0] == "owner/name"
    assert capsys.readouterr().out.endswith("owner/name: folder\n")
