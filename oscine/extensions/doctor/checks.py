"""`oscine doctor`: what this machine is, which models fit it, and what is missing.

Its output is made to be pasted into an issue: it has no names of users or hosts, and no keys.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from oscine.cli.error import FAILED, CommandError
from oscine.cli.serve.options import PROFILES
from oscine.cli.serve.read_options import read_profile
from oscine.extensions.doctor.facts import Facts, gather
from oscine.extensions.timing.layout import choose
from oscine.ops.triton_range import CUDA_REMEDY, REMEDY, TESTED, TORCH, is_tested
from oscine.system.environment import Environment

_GB = 1e9
_LEAST_DISK = 20 * _GB  # for 20b and its packed weights
_INSTALL_TORCH = f"pip install 'torch{TORCH}'"


@dataclass(frozen=True, slots=True)
class Problem:
    what: str
    remedy: str
    fatal: bool = False  # nothing can be served


@dataclass(frozen=True, slots=True)
class Diagnosis:
    facts: Facts
    kernels: str  # the state of the C kernels
    fits: list[dict[str, Any]]
    models: list[dict[str, Any]]
    problems: list[Problem]
    layouts: list[dict[str, Any]]  # of several GPUs, by model and profile

    @property
    def healthy(self) -> bool:
        return not any(problem.fatal for problem in self.problems)


def run(args: argparse.Namespace) -> None:
    found = diagnose(gather())
    print(json.dumps(asdict(found) | {"healthy": found.healthy}, indent=2) if args.json else report(found))
    if not found.healthy:
        raise CommandError("nothing can be served here: see the problems above", FAILED)


def diagnose(facts: Facts) -> Diagnosis:
    models = _installed()
    problems = [*_problems(facts), *_missing_models(models)]
    if "torch" not in facts.packages:
        return Diagnosis(facts, "not looked for", [], models, problems, [])
    try:
        why, fits = _kernels(), _fits(facts)
    except (ImportError, OSError) as error:  # a library that torch needs, and that is not there
        broken = Problem(f"torch cannot be imported: {error}", _INSTALL_TORCH, fatal=True)
        return Diagnosis(facts, "not looked for", [], models, [broken, *problems], [])
    if why is not None:
        remedy = "install gcc 12 or newer, or clang"
        problems.append(Problem(f"there are no C kernels, so a CPU is slow: {why}", remedy))
    return Diagnosis(facts, why or "compiled", fits, models, problems, _layouts(facts))


def _kernels() -> str | None:
    """Compiles the kernels if that was not done yet. Returns why there are none."""
    from oscine.ops.native.library import unavailable

    return unavailable()


def _fits(facts: Facts) -> list[dict[str, Any]]:
    from oscine.extensions.doctor.fits import fits

    return [
        {
            "model": found.model,
            "where": found.where,
            "fits": found.plan is not None,
            "context": found.plan.max_model_len if found.plan else None,
            "sequences": found.plan.max_num_seqs if found.plan else None,
            "step_tokens": found.plan.max_num_batched_tokens if found.plan else None,
            "says": str(found),
        }
        for found in fits(facts)
    ]


def _layouts(facts: Facts) -> list[dict[str, Any]]:
    """What `oscine serve` chooses where no option names a layout."""
    from oscine.extensions.doctor.fits import MODELS

    count, found = len(facts.gpus), []
    for model in MODELS if count > 1 else ():
        for profile in PROFILES:
            layout, why = choose(read_profile(profile) | {"profile": profile, "model": model}, count, facts.machine)
            found.append({"model": model, "profile": profile, "layout": str(layout), "why": why})
    return found


def _installed() -> list[dict[str, Any]]:
    from oscine.extensions.formats.installed import installed

    return [
        {"name": m.name, "place": m.place, "format": m.format, "bytes": m.num_bytes, "whole": m.whole}
        for m in installed()
    ]


def _problems(facts: Facts) -> Iterator[Problem]:
    torch = facts.packages.get("torch")
    if torch is None:
        yield Problem("torch is not installed", _INSTALL_TORCH, fatal=True)
    if facts.devices and not facts.gpus:
        yield Problem("there is a GPU, and nvidia-smi does not answer", "install NVIDIA's driver, or start its service")
    if facts.gpus and torch is not None:
        if torch.endswith("+cpu"):
            yield Problem(f"torch {torch} is built without CUDA, so the GPUs are not used", CUDA_REMEDY)
        if "triton" not in facts.packages:
            yield Problem("triton is not installed, so the GPUs are not used", REMEDY)
        elif not is_tested(facts.packages["triton"]):
            tried = Environment().untested_triton
            then = "and used, as OSCINE_UNTESTED_TRITON is set" if tried else "so no engine starts on the GPUs"
            yield Problem(f"triton {_triton(facts)}, {then}", REMEDY)
        for gpu in facts.gpus:
            major = gpu.capability.partition(".")[0]
            if not (major.isdigit() and int(major) >= 8):
                what = f"{gpu.name} has compute capability {gpu.capability}; the kernels need 8.0"
                yield Problem(what, "use another GPU, or --device cpu")
    for folder, free in facts.disk.items():
        if free < _LEAST_DISK:
            what = f"{free / _GB:.0f} GB are free in {folder}; gpt-oss-20b takes 14 GB, as much again when packed"
            yield Problem(what, "--download-dir, HF_HOME and XDG_CACHE_HOME name other folders")


def _triton(facts: Facts) -> str:
    version = facts.packages.get("triton")
    if version is None:
        return "none; only GPUs need it"
    return f"{version} is {'in' if is_tested(version) else 'outside'} the tested range, {TESTED}"


def _missing_models(models: list[dict[str, Any]]) -> Iterator[Problem]:
    for model in models:
        if not model["whole"]:
            yield Problem(f"{model['name']} is incomplete", f"oscine pull {model['name']}")
    if all(model["place"] in ("Oscine", "packed") for model in models):
        yield Problem("no published model is on this machine", "oscine pull gpt-oss-20b")


def report(found: Diagnosis) -> str:
    return "\n".join(_lines(found))


def _lines(found: Diagnosis) -> Iterator[str]:
    facts = found.facts
    yield from (f"oscine {facts.oscine} ({facts.commit}), Python {facts.python}", f"system     {facts.system}")
    features = " ".join(facts.features) or "none of those that the kernels use"
    yield f"processor  {facts.processor}, {facts.cores} cores usable ({features})"
    yield f"kernels    C: {found.kernels}; compiler: {facts.compiler or 'none'}"
    yield f"Triton     {_triton(facts)}"
    available = "?" if facts.available is None else f"{facts.available / _GB:.1f}"
    yield f"memory     {facts.memory / _GB:.1f} GB, {available} GB available"
    for i, gpu in enumerate(facts.gpus):
        sizes = f"{gpu.total / _GB:.1f} GB, {gpu.free / _GB:.1f} GB free"
        yield f"GPU {i}      {gpu.name}, {sizes}, compute capability {gpu.capability}, driver {gpu.driver}"
    if not facts.gpus:
        yield "GPU        none"
    if facts.machine is not None and len(facts.machine.gpus) > 1:
        yield f"links      {facts.machine.link.name if facts.machine.link else 'no peer access'}"
    yield from (f"disk       {free / _GB:.0f} GB free in {folder}" for folder, free in facts.disk.items())
    yield "packages   " + ", ".join(f"{name} {version}" for name, version in facts.packages.items())
    yield "models"
    for model in found.models:
        yield f"  {model['name']} ({model['place']}, {model['format']}, {model['bytes'] / _GB:.2f} GB)"
    if found.fits:
        yield "what fits"
        yield from (f"  {fit['model']} on {fit['where']} {fit['says']}" for fit in found.fits)
    if found.layouts:
        yield "layouts"
        for one in found.layouts:
            yield f"  {one['model']}, --profile {one['profile']}: {one['layout']}: {one['why']}"
    yield "problems" if found.problems else "no problems"
    yield from (f"  {problem.what}\n    -> {problem.remedy}" for problem in found.problems)
