"""Options of models on demand: durations, folders, what excludes each other, and room beside loaded models."""

from pathlib import Path
from typing import Any

import pytest

from oscine.cli.serve.read_options import make_config
from oscine.extensions.models.memory import Room
from oscine.extensions.models.sources import hub_name, sources_of
from oscine.settings.models import FOREVER, seconds_of
from oscine.settings.option import OptionError
from tests.fake_model import write_fake_model
from tests.nvml_library import compile_h100, needs_compiler

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("0", 0), ("90", 90), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("250ms", 0.25), ("+2s", 2), ("0s", 0)),
        *(("-1", FOREVER), ("-5m", FOREVER), ("-0", 0)),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "5 m", "5x", "m", "--1", "1h-3m", "-", "٥m"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is no duration"):
        seconds_of(text)
    with pytest.raises(OptionError, match="--keep-alive must be a duration"):
        make_config([{"keep-alive": text}])


def test_models_of_a_folder_and_by_name(tmp_path: Path) -> None:
    for name in ("b", "a", ".hidden", "models--owner--some--name/snapshots/123", "other"):
        (tmp_path / name).mkdir(parents=True)
        write_fake_model(tmp_path / name)
    (tmp_path / "other" / "config.json").unlink()
    (tmp_path / "models--owner--unfinished").mkdir()
    (tmp_path / "file.txt").write_text("x")
    config = make_config([{"models": ("oscine-nano",), "models-dir": str(tmp_path), "max-num-seqs": 3}])
    found = {source.name: source for source in sources_of(config)}
    assert list(found) == ["oscine-nano", "a", "b", "owner/some--name"]
    assert {source.options.scheduler.max_num_seqs for source in found.values()} == {3}
    assert found["a"].path == tmp_path / "a"
    assert found["oscine-nano"].path is None
    assert found["owner/some--name"].options.model.download_dir == str(tmp_path)
    assert found["oscine-nano"].num_bytes() == pytest.approx(11e6, rel=0.1)


def test_random_weights_have_any_names() -> None:
    config = make_config([{"models": ("one", "two"), "random-weights": "20b"}])
    found = sources_of(config)
    assert [source.name for source in found] == ["one", "two"]
    assert all(source.options.model.random_weights == "20b" for source in found)
    assert found[0].num_bytes() == pytest.approx(13.8e9, rel=0.01)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"models": ("no such model",)}, "--models has 'no such model': model 'no such model' is neither"),
        ({"models": ("oscine-nano", "oscine-nano")}, "--models has two models with the name 'oscine-nano'"),
        ({"models": ("oscine-nano",), "model": "gpt-oss-20b"}, "--models names all models"),
        ({"models": ("oscine-nano",), "served-model-name": ("x",)}, "--served-model-name is for one model"),
        ({"models": ("oscine-nano",), "data-parallel-size": 2}, "--models needs --data-parallel-size 1"),
        (
            {"models": ("oscine-nano",), "pinned-models": ("b",)},
            "--pinned-models must be names of these models, not 'b'",
        ),
        ({"models-dir": "/no/such/folder"}, "--models-dir must be a folder"),
    ],
)
def test_what_cannot_be_served_is_said_at_the_start(given: dict[str, Any], error: str) -> None:
    with pytest.raises(OptionError) as caught:
        sources_of(make_config([given]))
    assert str(caught.value).startswith(error)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *(("gpt-oss:20b", "openai/gpt-oss-20b"), ("gpt-oss-120b", "openai/gpt-oss-120b"), ("a/b", "a/b")),
        *(
            ("hf.co/a/b", "a/b"),
            ("gpt-oss-safeguard:20b", "openai/gpt-oss-safeguard-20b"),
            ("gpt-oss:latest", "gpt-oss:latest"),
        ),
    ],
)
def test_names_on_the_hub(given: str, name: str) -> None:
    assert hub_name(given) == name


def room(free: int | None, *, on_gpu: bool, **given: Any) -> Room:
    options = make_config([given]).engine
    return Room(options, on_gpu=on_gpu, host_bytes=lambda: free, gpu_bytes=lambda gpus: free)


def test_a_cache_that_takes_all_leaves_no_room() -> None:
    assert not room(1 << 50, on_gpu=True).fits(GIB, ["GPU-0"])
    assert room(1 << 50, on_gpu=False).fits(GIB, [])


def test_models_of_a_given_size_share_a_gpu_if_they_fit() -> None:
    given = {"kv-cache-bytes": 4 * GIB}  # with 14 GiB of weights, 16.1 prepared, and 5 of workspace: 25.1
    assert room(26 * GIB, on_gpu=True, **given).fits(14 * GIB, ["GPU-0"])
    assert not room(25 * GIB, on_gpu=True, **given).fits(14 * GIB, ["GPU-0"])
    assert not room(None, on_gpu=True, **given).fits(14 * GIB, ["GPU-0"])
    assert not room(26 * GIB, on_gpu=True, **given).fits(None, ["GPU-0"])
    assert room(20 * GIB, on_gpu=True, **{"gpu-memory-bytes": 20 * GIB}).fits(14 * GIB, ["GPU-0"])
    assert not room(20 * GIB - 1, on_gpu=True, **{"gpu-memory-bytes": 20 * GIB}).fits(14 * GIB, ["GPU-0"])


def test_the_host_needs_room_for_the_copy_of_a_sleeping_model() -> None:
    assert room(17 * GIB, on_gpu=True).fits_host(14 * GIB)
    assert not room(16 * GIB, on_gpu=True).fits_host(14 * GIB)
    assert room(1, on_gpu=False).fits_host(14 * GIB)


@needs_compiler
def test_free_memory_of_gpus_is_read_from_the_driver(tmp_path: Path) -> None:
    from oscine.system.nvml import free_bytes

    library = compile_h100(tmp_path)
    assert free_bytes(["GPU-0"], library) == 79 * GIB
    assert free_bytes(["GPU-0", "GPU-3", "GPU-1"], library) == 79 * GIB - 3
    assert free_bytes(["GPU-0", "GPU-9"], library) is None
    assert free_bytes([], library) is None
    assert free_bytes(["GPU-0"], str(tmp_path / "none.so")) is None
