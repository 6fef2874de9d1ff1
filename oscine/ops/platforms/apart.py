"""A platform's trial in a process of its own: kernels that fault or hang end that process, not the start."""

import subprocess
from collections.abc import Sequence

from oscine.ops.platforms.interface import Platform
from oscine.ops.target import Target
from oscine.system.python_child import child_environment, module_command

_PROGRAM = "oscine.ops.platforms.trial"
DEADLINE_S = 300.0  # compiling the kernels is most of it


def tried_apart(platform: Platform, target: Target) -> str | None:
    """What is wrong with the results of the platform's new kernels, in words. None: nothing, or it has none."""
    if not platform.needs_trial(target):
        return None
    gpu = target.device.index or 0
    return outcome_of([*module_command(_PROGRAM), platform.name, str(gpu), target.activation_dtype], DEADLINE_S)


def outcome_of(command: Sequence[str], deadline_s: float) -> str | None:
    """Of a process that prints what is wrong as its last line, or nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, env=child_environment())
    except subprocess.TimeoutExpired:
        return f"their trial was not done after {deadline_s:g} s"
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
    if done.returncode:
        return ": ".join([f"their trial ended with status {done.returncode}", *last])
    return last[0] if last else None
