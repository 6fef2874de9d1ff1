"""Which engines and ranks `oscine serve` makes of the visible GPUs."""

from pathlib import Path

import pytest

from oscine.cli.error import CommandError
from oscine.cli.serve.read_options import read_config
from oscine.settings.config import Config
from oscine.settings.devices import devices_of
from oscine.system.environment import Environment
from tests.cli.test_options import parser

MODEL = "openai/gpt-oss-20b"
THROUGHPUT = ("--profile", "max_throughput")


@pytest.fixture(autouse=True)
def _unknown_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has, its driver says nothing."""
    monkeypatch.setattr("oscine.extensions.timing.layout.describe_gpus", lambda *_, **__: None)


def config_of(*arguments: str, num_gpus: int | None) -> tuple[Config, list[str]]:
    notes: list[str] = []
    return read_config(vars(parser().parse_args(arguments)), notes.append, num_gpus), notes


def layout(*arguments: str, num_gpus: int | None) -> tuple[int, int]:
    """Engines, and ranks of each."""
    config, notes = config_of(*arguments, num_gpus=num_gpus)
    sizes = config.server.data_parallel_size, config.engine.model.tensor_parallel_size
    assert len(notes) == (sizes != (1, 1))
    return sizes


@pytest.mark.parametrize(
    ("num_gpus", "latency", "throughput"),
    [
        (0, (1, 1), (1, 1)),
        (1, (1, 1), (1, 1)),
        (2, (1, 2), (2, 1)),
        (3, (3, 1), (3, 1)),
        (4, (1, 4), (4, 1)),
        (6, (3, 2), (6, 1)),
        (8, (1, 8), (8, 1)),
        (16, (2, 8), (16, 1)),
    ],
)
def test_all_visible_gpus_are_used_as_the_profile_says(
    num_gpus: int, latency: tuple[int, int], throughput: tuple[int, int]
) -> None:
    assert layout(MODEL, num_gpus=num_gpus) == latency
    assert layout(MODEL, "--profile", "low_latency", num_gpus=num_gpus) == latency
    assert layout(MODEL, *THROUGHPUT, num_gpus=num_gpus) == throughput
    if num_gpus:
        assert layout(MODEL, "--gpus", "all", num_gpus=num_gpus) == latency
        assert layout(MODEL, "--gpus", str(num_gpus), *THROUGHPUT, num_gpus=16) == throughput
        (engines, ranks), given = latency, "auto"
        assert sum(map(len, devices_of(given, engines, ranks, num_gpus))) == num_gpus


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--device", "cuda:0"), (1, 1)),
        (("--experts-on-host", "auto"), (1, 1)),
        (("--device", "cpu"), (1, 1)),
        (("--device", "cuda:0,1", "--tensor-parallel-size", "2"), (1, 2)),
        (("--tensor-parallel-size", "1"), (1, 1)),
        (("--tp-size", "2"), (1, 2)),
        (("--data-parallel-size", "3"), (3, 1)),
        (("--data-parallel-size", "2", "--tensor-parallel-size", "2"), (2, 2)),
        (("--kv-events-config", '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:*"}'), (1, 1)),
        (("--executor", "fake"), (1, 1)),
        (("--gpus", "1"), (1, 1)),
    ],
)
def test_what_a_user_says_stays(given: tuple[str, ...], expected: tuple[int, int]) -> None:
    for profile in ((), THROUGHPUT):
        config, notes = config_of(MODEL, *given, *profile, num_gpus=4)
        assert (config.server.data_parallel_size, config.engine.model.tensor_parallel_size) == expected
        assert notes == []


@pytest.mark.parametrize("model", [(), ("--random-weights", "120b"), (MODEL, "--load-format", "dummy")])
def test_small_and_random_models_stay_on_one_gpu_unless_asked(model: tuple[str, ...]) -> None:
    assert layout(*model, num_gpus=2) == (1, 1)
    assert layout(*model, "--gpus", "all", num_gpus=2) == (1, 2)
    assert layout(*model, "--gpus", "2", *THROUGHPUT, num_gpus=2) == (2, 1)


@pytest.mark.parametrize(
    ("given", "num_gpus", "message"),
    [
        (("--gpus", "3"), 2, r"--gpus must be at most the number of GPUs \(2\), not 3"),
        (("--gpus", "all"), 0, r"--gpus must be at most the number of GPUs \(0\), not all"),
        (("--gpus", "2"), None, "--gpus is for oscine serve"),
        (("--gpus", "2", "--tensor-parallel-size", "2"), 2, "exclude each other"),
        (("--gpus", "2", "--device", "cuda:0"), 2, "exclude each other"),
        (("--expected-load", "8:64:64", "--tensor-parallel-size", "2"), 2, "exclude each other"),
    ],
)
def test_errors_name_the_option(given: tuple[str, ...], num_gpus: int | None, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        config_of(MODEL, *given, num_gpus=num_gpus)


@pytest.mark.parametrize("value", ["0", "-1", "some", "1.5"])
def test_gpus_are_all_or_a_number(value: str) -> None:
    with pytest.raises(CommandError, match=f"--gpus: it must be all, or how many, not '{value}'"):
        parser().parse_args([MODEL, "--gpus", value])


@pytest.mark.parametrize("value", ["", "64", "64:1024", "64:1024:512:1", "0:1:1", "1:-1:1", "1:1.5:1", "1:1:٣"])
def test_an_expected_load_is_three_numbers(value: str) -> None:
    with pytest.raises(CommandError, match="--expected-load: it must be requests:prompt tokens:answer tokens"):
        parser().parse_args([MODEL, "--expected-load", value])


def test_the_command_line_wins_over_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("gpus: 4\nprofile: max_throughput\n")
    assert layout(MODEL, "--config", str(file), num_gpus=8) == (4, 1)
    assert layout(MODEL, "--config", str(file), "--profile", "low_latency", num_gpus=8) == (1, 4)
    config, notes = config_of(MODEL, "--config", str(file), "--device", "cuda:1", num_gpus=8)
    assert (config.engine.model.device, config.server.data_parallel_size, notes) == ("cuda:1", 1, [])


def test_what_needs_engines_of_one_gpu_gets_them() -> None:
    assert layout(MODEL, "--kv-offload-bytes", "1GiB", num_gpus=4) == (4, 1)
    assert layout(MODEL, "--kv-offload-bytes", "0", num_gpus=4) == (1, 4)
    assert layout(MODEL, "--experts-on-host", "auto", "--gpus", "4", num_gpus=4) == (4, 1)
    head = '{"method": "eagle3", "model": "a/head"}'
    assert layout(MODEL, "--speculative-config", head, num_gpus=4) == (4, 1)
    assert layout(MODEL, "--speculative-config", '{"method": "ngram"}', num_gpus=4) == (1, 4)


def test_the_log_says_which_layout_and_why() -> None:
    [one] = config_of(MODEL, num_gpus=4)[1]
    assert one == (
        "4 GPUs are used as 1 engine of 4 GPUs: the shortest time per token; "
        "--profile max_throughput is for many requests. See --gpus"
    )
    [sharing] = config_of(MODEL, "--gpus", "2", "--enable-expert-parallel", num_gpus=2)[1]
    assert (
        sharing
        == "2 GPUs are used as 2 engines of one GPU each that share their experts: as an option says. See --gpus"
    )
    [several] = config_of(MODEL, *THROUGHPUT, num_gpus=2)[1]
    assert several == (
        "2 GPUs are used as 2 engines of one GPU each: --profile max_throughput is for the most tokens per second. "
        "See --gpus"
    )


@pytest.mark.parametrize(("visible", "count"), [("0,1,2,3", 4), ("2", 1), ("", 0), ("-1", 0), ("GPU-8f,GPU-9e", 2)])
def test_gpus_are_those_that_are_visible(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Environment().num_gpus == count


def test_without_the_extension_one_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscine.cli.serve.read_options.is_there", lambda place: False)
    config, notes = config_of(MODEL, num_gpus=2)
    assert (config.server.data_parallel_size, config.engine.model.tensor_parallel_size) == (1, 1)
    assert notes == ["1 of 2 GPUs is used: a layout of several needs the extension timing"]
    assert config_of(MODEL, "--gpus", "1", num_gpus=2)[1] == []
    with pytest.raises(CommandError, match="--gpus above 1 needs the extension timing"):
        config_of(MODEL, "--gpus", "2", num_gpus=2)
