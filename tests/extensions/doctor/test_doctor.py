"""`oscine doctor`: facts, what fits by the memory plan, problems with their remedies, and the exit status."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from oscine.cli.serve.read_options import read_profile
from oscine.extensions.doctor import facts as facts_module
from oscine.extensions.doctor.checks import diagnose, report
from oscine.extensions.doctor.facts import Facts, GpuFacts, gather
from oscine.extensions.doctor.fits import Fit, fits
from oscine.extensions.timing.gpus import Gpu, Machine
from oscine.extensions.timing.layout import choose
from oscine.extensions.timing.machine import Link
from tests.cli.test_commands import run
from tests.extensions.doctor.test_nim import GIB, H200, facts

SMALL = GpuFacts("NVIDIA RTX 4080", 16 * GIB, 15 * GIB, "8.9", "570.1")
LINES = "NVIDIA H200, 143771, 143000, 9.0, 570.1\nNVIDIA GB10, [N/A], [N/A], 12.1, 580.0\nbroken\n"


def by_place(found: list[Fit]) -> dict[tuple[str, str], Fit]:
    return {(fit.model, fit.where): fit for fit in found}


def test_what_fits_follows_from_the_memory_plan() -> None:
    """As docs/small-gpus.md has it: 20b fits 16 GB, 120b with its experts on the host."""
    small = by_place(fits(facts(SMALL, available=70 * GIB)))
    plans = {model: small[model, "one NVIDIA RTX 4080"].plan for model in ("gpt-oss-20b", "gpt-oss-120b")}
    assert all(plan is not None for plan in plans.values())
    assert plans["gpt-oss-120b"] is not None
    assert plans["gpt-oss-120b"].on_host.num_layers > 30
    large = by_place(fits(facts(H200, H200)))
    alone, together = large["gpt-oss-120b", "one NVIDIA H200"].plan, large["gpt-oss-120b", "2 GPUs as one engine"].plan
    assert alone is not None
    assert together is not None
    assert alone.on_host.total == 0
    assert (alone.max_num_seqs, alone.max_num_batched_tokens) == (512, 8192)
    assert together.weights < 0.6 * alone.weights
    on_cpu = large["gpt-oss-120b", "the CPU"]
    assert on_cpu.plan is None
    assert "do not fit the memory: 32.0 GiB are free" in str(on_cpu)


@pytest.mark.parametrize(
    ("change", "problem", "fatal"),
    [
        ({"packages": {}}, "torch is not installed", True),
        ({"devices": 1}, "nvidia-smi does not answer", False),
        ({"gpus": (H200,), "packages": {"torch": "2.13.0+cpu", "triton": "3.6"}}, "built without CUDA", False),
        ({"gpus": (H200,), "packages": {"torch": "2.16.0", "triton": "3.10.0"}}, "3.10.0 is outside the tested", False),
        ({"gpus": (replace(H200, capability="7.5"),)}, "the kernels need 8.0", False),
        ({"gpus": (replace(H200, capability="[N/A]"),)}, "has compute capability [N/A]", False),
        ({"disk": {"~/.cache": 5 * 10**9}}, "5 GB are free in ~/.cache", False),
    ],
)
def test_problems_have_a_remedy(change: dict[str, object], problem: str, fatal: bool) -> None:
    found = diagnose(replace(facts(), **change))  # type: ignore[arg-type]
    assert any(problem in one.what and one.remedy for one in found.problems)
    assert found.healthy is not fatal
    assert problem in report(found)


def test_an_untested_triton_is_used_if_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(facts(H200), packages={"torch": "2.16.0", "triton": "3.10.0"})
    [problem] = [one for one in diagnose(found).problems if "triton" in one.what]
    assert problem.what.endswith("so no engine starts on the GPUs")
    monkeypatch.setenv("OSCINE_UNTESTED_TRITON", "1")
    [problem] = [one for one in diagnose(found).problems if "triton" in one.what]
    assert problem.what.endswith("and used, as OSCINE_UNTESTED_TRITON is set")


@pytest.mark.parametrize(
    ("packages", "says"),
    [
        ({}, "none; only GPUs need it"),
        ({"triton": "3.6.0"}, "3.6.0 is in the tested range, 3.6 to 3.9"),
        ({"triton": "3.9.1"}, "3.9.1 is in the tested range, 3.6 to 3.9"),
        ({"triton": "3.10.0"}, "3.10.0 is outside the tested range, 3.6 to 3.9"),
    ],
)
def test_triton_is_compared_with_the_tested_range(packages: dict[str, str], says: str) -> None:
    found = diagnose(replace(facts(), packages={"torch": "2.13.0"} | packages))
    assert f"\nTriton     {says}\n" in report(found)
    assert not [problem for problem in found.problems if "triton" in problem.what]  # there is no GPU


def test_gpus_are_those_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'E'\n{LINES}E\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    h200, gb10 = facts_module._gpus(None)
    assert (h200.name, h200.total, h200.capability, h200.unified) == ("NVIDIA H200", 143771 << 20, "9.0", False)
    assert (gb10.name, gb10.unified) == ("NVIDIA GB10", True)
    assert [gpu.name for gpu in facts_module._gpus("1")] == ["NVIDIA GB10"]  # what is free there changes all the time
    assert facts_module._gpus("") == facts_module._gpus("-1") == ()
    program.write_text("#!/bin/sh\nexit 9\n")
    assert facts_module._gpus(None) == ()


def test_the_facts_of_this_machine() -> None:
    found = gather()
    assert found.cores > 0
    assert found.memory > GIB
    assert found.packages["torch"]
    assert str(Path.home()) not in repr(found)


def test_a_folder_that_cannot_be_looked_at_is_no_failure(tmp_path: Path) -> None:
    """A name that is too long stands for one that this user may not enter, as root may enter all."""
    assert facts_module._free(tmp_path / ("x" * 300) / "hub") > 0


def test_it_works_without_a_torch_that_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libgomp.so.1 is missing')\n")
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = run("doctor", "--json", PYTHONPATH=path)
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert answer["healthy"] is False
    assert "libgomp.so.1 is missing" in answer["problems"][0]["what"]
    assert done.stderr == "oscine: error: nothing can be served here: see the problems above\n"


@pytest.mark.parametrize(("link", "says"), [(Link("NVLink", 1.66e-6, 3.5e11), "NVLink"), (None, "no peer access")])
def test_several_gpus_are_used_as_the_server_would(link: Link | None, says: str) -> None:
    h200 = Gpu("NVIDIA H200", H200.total, H200.free, (9, 0), 4.9e12, 1.07e15)
    machine = Machine((h200, h200), link)
    diagnosis = diagnose(replace(facts(H200, H200), machine=machine))
    text = report(diagnosis)
    assert f"\nlinks      {says}\n" in text
    for model in ("gpt-oss-20b", "gpt-oss-120b"):
        for profile in ("low_latency", "max_throughput"):
            layout, why = choose(read_profile(profile) | {"profile": profile, "model": model}, 2, machine)
            assert f"\n  {model}, --profile {profile}: {layout}: {why}\n" in text
    json.dumps(asdict(diagnosis))
    assert "layouts" not in report(diagnose(facts(H200)))


def test_a_healthy_machine_has_no_fatal_problem() -> None:
    found: Facts = facts(H200)
    diagnosis = diagnose(found)
    assert diagnosis.healthy
    text = report(diagnosis)
    assert "GPU 0      NVIDIA H200, 151.4 GB" in text
    assert (
        "gpt-oss-20b on one NVIDIA H200 fits, with a context of 131,072 tokens, 512 sequences, 8,192 tokens per step"
        in text
    )
    assert "oscine-nano (Oscine, safetensors, 0.01 GB)" in text
