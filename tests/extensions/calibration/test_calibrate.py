"""`oscine calibrate` on the embedded model: what it says and stores, engines that use it, and what is refused.

An engine on a CPU has keys in FP8 only by the reference ops, as where there is no C compiler.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oscine.chat.tokenizer import Tokenizer
from oscine.checkpoint.hub import NANO_FOLDER
from oscine.cli import main
from oscine.executor.sampling.rules import grammar_rules
from oscine.executor.start import load
from oscine.executor.start.shared import Start
from oscine.executor.start.stopwatch import Stopwatch
from oscine.executor.start.warm_up import prompts
from oscine.extensions.calibration.prompts import read_prompts
from oscine.extensions.calibration.scales import BIAS, NAME, check_place, find_scales, keep, place_of, scales_of
from oscine.model.config import ModelConfig
from oscine.ops.kv.fp8 import elements_and_exponents
from oscine.ops.platforms import native
from oscine.ops.target import Alone
from oscine.settings.config import NANO, CacheOptions, EngineOptions, ModelOptions
from oscine.settings.option import OptionError

CONFIG = ModelConfig.from_file(NANO_FOLDER / "config.json")
CHATS = (
    {"messages": [{"role": "user", "content": "What is 27 + 58?"}], "reasoning_effort": "low"},
    [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye"},
    ],
    {"custom_id": "1", "body": {"messages": [{"role": "user", "content": "Who are you?"}]}},
)
ASK = """
from oscine import LLM
if __name__ == "__main__":
    with LLM({model!r}, kv_cache_dtype="fp8", device="cpu", threads=1) as llm:
        print(llm.chat([{{"role": "user", "content": "What is 27 + 58?"}}], temperature=0, max_tokens=200).content)
"""
ALONE = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
IN_FP8 = CacheOptions(kv_cache_dtype="fp8", kv_cache_bytes=1 << 24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the embedded model, calibrated by a process."""
    folder = tmp_path_factory.mktemp("calibrated") / "nano"
    shutil.copytree(NANO_FOLDER, folder, ignore=lambda *_: ["eagle3"])
    prompts = folder.parent / "chats.jsonl"
    prompts.write_text("\n\n".join(map(json.dumps, CHATS)))
    command = [sys.executable, "-m", "oscine", "calibrate", str(folder), "--prompts", str(prompts), "--json"]
    environment = os.environ | ALONE | {"XDG_CACHE_HOME": str(folder.parent / "cache")}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    (folder.parent / "report.json").write_text(done.stdout)
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no C kernels. Returns the folder of scales in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "unavailable", lambda: "no compiler")
    return tmp_path / "oscine" / "kv_scales"


def start_of(asked: EngineOptions, communicator: Alone | None = None) -> Start:
    make = None if communicator is None else lambda _: communicator
    return Start(asked, lambda text: None, Stopwatch(), make, grammar_rules, None)


def options(folder: Path, **cache: Any) -> EngineOptions:
    return EngineOptions(ModelOptions(str(folder), device="cpu"), replace(IN_FP8, **cache), num_threads=1)


def test_the_report_has_each_layer_and_what_changes(folder: Path) -> None:
    report = json.loads((folder.parent / "report.json").read_text())
    assert (report["prompts"], report["checked"], report["file"]) == (3, 3, str(folder / NAME))
    assert [(row["layer"], row["kind"]) for row in report["layers"]] == [
        (layer, kind) for layer in range(CONFIG.num_hidden_layers) for kind in ("keys", "values")
    ]
    stored = json.loads((folder / NAME).read_text())
    for row in report["layers"]:
        assert row["exponents"] == stored[row["kind"]][row["layer"]]
        assert all(2 * most <= 448 * 2.0**n for most, n in zip(row["largest"], row["exponents"], strict=True))
        assert row["clamped"] == 0
        assert 0.02 < row["dynamic_error"] < 0.03
        assert row["calibrated_error"] == pytest.approx(row["dynamic_error"], rel=0.01)
    for change in report["next_tokens"].values():
        assert change["positions"] == report["tokens"]
        assert change["equal_greedy"] > 0.95
        assert 0 < change["mean_change"] < 0.01 < change["largest_change"]


def test_an_engine_uses_the_scales_by_itself_and_says_so(folder: Path) -> None:
    """A program where there is no C compiler."""
    script = folder.parent / "ask.py"
    script.write_text(ASK.format(model=str(folder)))
    environment = os.environ | ALONE | {"PATH": str(folder), "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, script], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == "27 + 58 = 85.\n"
    assert f"\nkeys and values in FP8 have the calibrated scales of {folder / NAME}\n" in done.stderr


def test_pages_have_the_exponents_of_the_file(folder: Path, elsewhere: Path) -> None:
    """In the places of those of tokens: pages describe themselves, so engines with other scales can read them."""
    executor = load.load_executor(options(folder), lambda text: None, Stopwatch()).executor
    plan = prompts(executor, 100)
    plan.sequences[0] = plan.sequences[0]._replace(pages=[[0, 1], [2, 3]])  # groups share memory
    executor.execute(plan)
    file = json.loads((folder / NAME).read_text())
    for layers, pages, first in zip(CONFIG.layers_by_window.values(), executor.kv, (0, 2), strict=True):
        _, exponents = elements_and_exponents(pages[first])
        for place, layer in enumerate(layers):
            for kind, name in enumerate(("keys", "values")):
                expected = torch.tensor(file[name][layer])[:, None] + BIAS
                assert (exponents[place, kind] == expected).all()


@pytest.mark.parametrize("kv_scales", ["auto", "none"])
def test_without_a_file_or_if_asked_tokens_have_their_own(
    folder: Path, elsewhere: Path, kv_scales: str, tmp_path: Path
) -> None:
    given = folder if kv_scales == "none" else NANO_FOLDER
    assert start_of(options(given, kv_scales=kv_scales)).kv_exponents() is None
    with pytest.raises(OptionError, match="--kv-scales needs --kv-cache-dtype fp8"):
        CacheOptions(kv_scales="FILE")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_the_scales_of_its_heads(folder: Path, elsewhere: Path, rank: int) -> None:
    class OneOfTwo(Alone):
        num_ranks = 2

    one = OneOfTwo()
    one.rank = rank
    found, file = start_of(options(folder), one).kv_exponents(), json.loads((folder / NAME).read_text())
    assert found is not None
    layers = zip(file["keys"], file["values"], strict=True)
    expected = [[[keys[rank] + BIAS], [values[rank] + BIAS]] for keys, values in layers]
    assert [layer.tolist() for layer in found] == expected
    assert all(layer.dtype == torch.uint8 and layer.is_contiguous() for layer in found)


def changed(folder: Path, target: Path, **fields: Any) -> Path:
    """A file like that of the folder, with other fields."""
    target.write_text(json.dumps(json.loads((folder / NAME).read_text()) | fields))
    return target


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"weights": "0123456789abcdef"}, "the scales are of other weights than this model's: calibrate it again"),
        ({"keys": [[1, 2]]}, "keys must have 6 layers of 2 exponents"),
        ({"values": [[1, 200]] * 6}, "values must have 6 layers of 2 exponents"),
        ({"keys": [[1, 2.5]] * 6}, "keys must have 6 layers of 2 exponents"),
        ({"head_dim": 32}, "head_dim is 32, and this model's is 64"),
    ],
)
def test_a_file_of_another_model_is_refused_in_one_line(
    folder: Path, elsewhere: Path, tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    file = changed(folder, tmp_path / "other.json", **fields)
    with pytest.raises(ValueError, match=says) as caught:
        start_of(options(folder, kv_scales=str(file)))
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_scales_of_a_model_that_cannot_be_written_are_in_the_cache(
    folder: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of the embedded model, which is given by name. A file beside a model counts less, and goes."""
    found = find_scales("auto", folder, CONFIG)
    assert found is not None
    scales = scales_of(found[1], json.loads((folder / NAME).read_text())["weights"], CONFIG.head_dim)

    def keep_of(options: ModelOptions) -> Path:
        file = place_of(scales.weights, options, folder)
        keep(scales, file, folder)
        return file

    own = keep_of(ModelOptions(NANO))
    assert own.parent == elsewhere
    assert find_scales("auto", folder, CONFIG) == find_scales("auto", NANO_FOLDER, CONFIG) == (own, found[1])
    assert keep_of(ModelOptions(str(folder))) == folder / NAME
    assert find_scales("auto", folder, CONFIG) == found
    assert not own.exists()
    assert (folder / NAME).stat().st_mode & 0o777 == 0o644
    folder.chmod(0o777)  # a folder that everyone can change is not written
    try:
        assert keep_of(ModelOptions(str(folder))) == own
    finally:
        folder.chmod(0o755)


def test_a_cache_that_cannot_be_entered_has_no_scales(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose user has no home. A name that is too long stands for it: root may enter all folders."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("x" * 300)))
    assert find_scales("auto", NANO_FOLDER, CONFIG) is None
    found = find_scales("auto", folder, CONFIG)
    assert found is not None
    weights = json.loads((folder / NAME).read_text())["weights"]
    keep(scales_of(found[1], weights, CONFIG.head_dim), place_of(weights, ModelOptions(str(folder)), folder), folder)
    with pytest.raises(OSError, match=f"{weights}.json: cannot be written: File name too long"):
        place_of(weights, ModelOptions(NANO), NANO_FOLDER)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("a.txt", "is there and has no calibrated scales, so it is kept"),  # the prompts
        ("config.json", "is there and has no calibrated scales, so it is kept"),
        ("", "is there and has no calibrated scales, so it is kept"),
        ("a.txt/scales.json", "cannot be written: Not a directory"),
    ],
)
def test_a_place_for_no_scales_is_refused_before_anything_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str, says: str
) -> None:
    (tmp_path / "a.txt").write_text("hello")
    shutil.copy(NANO_FOLDER / "config.json", tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    file = tmp_path / output
    assert main(["calibrate", "no-model", "--prompts", str(tmp_path / "a.txt"), "--output", str(file)]) == 1
    _, err = capsys.readouterr()
    assert err.startswith(f"oscine: error: {file}: {says}")
    assert err.count("\n") == 1
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_files_of_scales_and_empty_ones_are_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.json").touch()
    shutil.copy(folder / NAME, tmp_path)
    for name in ("empty.json", NAME, "new.json"):
        check_place(tmp_path / name)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty.json", NAME]


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    tokenizer = Tokenizer(NANO_FOLDER)
    for name, text in (("a.txt", b"hello\nhello"), ("a.jsonl", b'[{"role": "user", "content": "hello"}]\n' * 2)):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text)
        first, second = read_prompts(tmp_path / name, tokenizer, 1000)
        assert first == second


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", b'[{"role": "user", "content": "hi"}]\n\n{"messages": []}', ":3: Invalid value for 'messages'"),
        ("a.jsonl", b'[{"role": "user", "content": "hi"}]\nwhat?', ":2: not JSON: "),
        ("a.jsonl", b'{"prompt": "hi"}', ":1: Object missing required field `messages`"),
        ("a.jsonl", b'[{"role": "user"}]', ":1: Invalid value for 'messages[0].content'"),
        ("a.txt", b"hello\n\xff\n", ":2: not UTF-8"),
        ("a.txt", b"hello\n" + b"a b " * 70_000, ":2: longer than the context of 131,072 tokens"),
        ("a.txt", b"\n \n", ": has no prompts"),
        ("a.txt", None, ": cannot be read: No such file or directory"),
    ],
)
def test_bad_prompts_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: bytes | None, says: str
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_bytes(text)
    assert main(["calibrate", "oscine-nano", "--prompts", str(file), "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith(f"oscine: error: {file}{says}")
    assert (out, err.count("\n")) == ("", 1)
