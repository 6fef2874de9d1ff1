"""The table of backends: its choices and its refusals."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from oscine.ops import triton_range
from oscine.ops.attention import blackwell as attention
from oscine.ops.moe.reference import moe
from oscine.ops.platforms import table
from oscine.ops.platforms.apart import outcome_of, tried_apart
from oscine.ops.platforms.interface import Platform
from oscine.ops.platforms.table import PLATFORMS, after_trial, choose, platform_of, resolve
from oscine.ops.target import Target
from tests.ops.bound import CPU_TARGET, reference_ops
from tests.ops.chips import AMD_CHIPS, SIZES


def gpu(arch: int) -> Target:
    return Target(torch.device("cuda"), divmod(arch, 10), *SIZES[arch])


def test_every_op_of_every_platform_resolves() -> None:
    for platform in PLATFORMS:
        assert resolve(CPU_TARGET, choose(platform.name)).moe is moe or platform.name != "cpu"


def test_a_chip_has_its_platform() -> None:
    assert platform_of(CPU_TARGET).name == "cpu"
    for arch in SIZES:
        family = {9: "hopper", 10: "blackwell", 12: "blackwell_rtx"}
        assert platform_of(gpu(arch)).name == family.get(arch // 10, "cuda")


def tried_here(platform: Platform, target: Target) -> str | None:
    """There is no such GPU."""
    return platform.trial(target) if platform.needs_trial(target) else None


@pytest.mark.parametrize(
    ("program", "wrong"),
    [
        ("print('compiled'); print('the results are off')", "not used: the results are off"),
        ("raise RuntimeError('no ptxas')", "not used: their trial ended with status 1: RuntimeError: no ptxas"),
        ("import os; os.abort()", "not used: their trial ended with status -6;"),
        ("import threading; threading.Event().wait()", "not used: their trial was not done after 0.5 s"),
    ],
)
def test_portable_kernels_serve_where_a_trial_fails(program: str, wrong: str) -> None:
    lines: list[str] = []
    target = replace(gpu(100), activation_dtype="fp8")
    deadline_s = 0.5 if "wait" in program else 60.0
    platform, changed = after_trial(
        platform_of(target), target, lines.append, lambda *_: outcome_of([sys.executable, "-c", program], deadline_s)
    )
    assert platform.name == "cuda"
    assert changed == replace(target, activation_dtype="auto")
    [line] = lines
    assert line.startswith("warning: the kernels of platform blackwell are not used: ")
    assert wrong in line
    assert "\n" not in line


def test_what_the_process_of_a_trial_says_is_its_outcome() -> None:
    """Without such a GPU it fails; a platform without new kernels has nothing to say."""
    assert outcome_of([sys.executable, "-c", "print()"], 60.0) is None
    if not torch.cuda.is_available():
        failed = tried_apart(platform_of(gpu(100)), replace(gpu(100), activation_dtype="fp8"))
        assert failed is not None
        assert failed.startswith("their trial ended with status 1: ")


def test_prefill_attention_of_10x_is_tried_at_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(attention, "trial", lambda target: f"wrong on {target.sm_count} SMs")
    monkeypatch.setattr(triton_range, "installed", lambda: "3.9.0")
    platform, _ = after_trial(platform_of(gpu(100)), gpu(100), lines.append, tried_here)
    assert platform.name == "cuda"
    assert choose(platform.name)["attention"] == "triton"
    assert "platform blackwell are not used: wrong on 148 SMs" in lines[0]


def test_a_platform_without_new_kernels_needs_no_trial() -> None:
    for arch in (80, 90, 120):
        target = gpu(arch)
        assert after_trial(platform_of(target), target, pytest.fail) == (platform_of(target), target)


@pytest.mark.parametrize(("version", "served"), [("3.9.0", True), ("3.10.1", True), ("3.8.0", False), (None, False)])
def test_fp8_experts_of_blackwell_need_a_triton_that_has_them(
    monkeypatch: pytest.MonkeyPatch, version: str | None, served: bool
) -> None:
    monkeypatch.setattr(triton_range, "installed", lambda: version)
    for arch in (100, 103, 120, 121):
        lacking = platform_of(gpu(arch)).lacking_for_fp8_experts
        assert (lacking(2880) is None) == served
        assert "multiples of 32, not 48" in str(lacking(48))


def test_an_amd_gpu_is_described_as_rocm_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls it a CUDA device of capability 9.4; as such it would get Hopper's launches."""
    chip = SimpleNamespace(
        major=9, minor=4, multi_processor_count=304, shared_memory_per_block=65536, gcnArchName="gfx942:sramecc+:xnack-"
    )
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    target = Target.of(torch.device("cuda"))
    assert target == replace(AMD_CHIPS["gfx942"], device=torch.device("cuda"), communicator=target.communicator)
    assert {target.dependent_launch, target.warp_groups, target.tensor_memory} == {False}
    assert platform_of(target).name == "rocm"
    assert target.program({"num_warps": 32, "maxnreg": 64}) == {"num_warps": 16}
    with pytest.raises(ValueError, match="gfx1100"):
        platform_of(replace(target, architecture="gfx1100"))


def test_float32_is_computed_by_the_references_on_any_gpu() -> None:
    for arch in SIZES:
        assert set(choose(platform_of(gpu(arch), torch.float32).name).values()) == {"reference"}


def test_ops_are_bound_to_their_target() -> None:
    target = gpu(120)
    ops = resolve(target, choose(platform_of(target).name))
    assert ops.norm_route.args == (target,)  # type: ignore[attr-defined]
    assert ops.chooser.choose is not reference_ops().chooser.choose


def test_the_choice_of_one_token_is_left_unless_others_read_it() -> None:
    for leave in (True, False):
        norm_route = resolve(gpu(90), choose("hopper"), leave_choice=leave).norm_route
        assert norm_route.keywords == ({"leave_choice": True} if leave else {})  # type: ignore[attr-defined]
    beside = resolve(gpu(90), choose("hopper", {"moe": "triton"})).norm_route
    assert beside.keywords == {}, "that moe cannot choose"  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_of_another_kind_is_not_taken_for_a_cpu(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="'mps' is not supported"):
        platform_of(Target(torch.device("mps")), dtype)


def test_overrides_are_kept() -> None:
    choice = choose("cpu", {"moe": "reference"})
    assert set(choice) == set(table.TABLE)
    assert choice["moe"] == "reference"


@pytest.mark.parametrize(
    ("device", "overrides", "named"),
    [
        ("cpu", {"moe": "warp-drive"}, "'warp-drive'"),
        ("cpu", {"fly": "reference"}, "'fly'"),
        ("mps", {}, "'mps'"),
    ],
)
def test_what_the_table_lacks_is_named(device: str, overrides: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        choose(device, overrides)


def test_a_backend_that_cannot_be_imported_does_not_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.TABLE["moe"], "broken", "moe.absent")
    with pytest.raises(ValueError, match="'broken' of op 'moe' cannot be loaded"):
        resolve(CPU_TARGET, choose("cpu", {"moe": "broken"}))
