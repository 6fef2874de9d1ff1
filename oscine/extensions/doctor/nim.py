"""NIM's commands: `oscine list-model-profiles` and `oscine download-to-cache`."""

import argparse
from collections.abc import Sequence

from oscine.cli.error import USAGE, CommandError, ended_by
from oscine.extensions.apis.conventions.nim_variables import download_dir, selected_model
from oscine.extensions.apis.conventions.profiles import PROFILES, Profile, find_profile
from oscine.extensions.doctor.facts import Facts, gather
from oscine.extensions.doctor.fits import why_not
from oscine.settings.config import NANO, ModelOptions
from oscine.system.environment import Environment


def run_list(args: argparse.Namespace) -> None:
    facts = gather()
    print(_system(facts))
    reasons = {profile: why_not(profile, facts) for profile in PROFILES}
    print("MODEL PROFILES\n- Compatible with system and runnable:")
    for profile, why in reasons.items():
        if why is None:
            print(f"  - {profile.id} ({profile.model} {profile.name})")
    print("- Incompatible with system:")
    for profile, why in reasons.items():
        if why is not None:
            print(f"  - {profile.id} ({profile.model} {profile.name}): {why}")


def _system(facts: Facts) -> str:
    lines = [f"  - ({i}) {gpu.name} [compute capability {gpu.capability}]" for i, gpu in enumerate(facts.gpus)]
    return "\n".join(["SYSTEM INFO", "- GPUs:" + ("" if lines else " <None>"), *lines])


def run_download(args: argparse.Namespace) -> None:
    from oscine.checkpoint.hub import find_model

    variables = Environment().nim
    with ended_by(ValueError):
        models = _models(PROFILES if args.all else [find_profile(name) for name in args.profiles])
        models = models or [selected_model(variables)]
        for model in models:
            if model == NANO:
                raise CommandError("name a profile: --profiles, --all, NIM_MODEL_PROFILE or NIM_MODEL_PATH", USAGE)
            print(f"{model}: {find_model(ModelOptions(model, download_dir=download_dir(variables)))}")


def _models(profiles: Sequence[Profile]) -> list[str]:
    return [model for model in dict.fromkeys(profile.model for profile in profiles) if model != NANO]
