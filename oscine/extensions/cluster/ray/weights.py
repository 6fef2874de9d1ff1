"""Where a cluster's machines learn from which other one they read weights: a named actor, made at its first question.

It ends with the replica that made it. The next question makes another one, which knows nothing: then some file may come
from the hub once more.
"""

import time
from typing import Any

import ray
from ray.exceptions import RayError

from oscine.extensions.replicas.weights import Holders

_ANSWER_S = 30.0  # the actor may have to start first
_TRIES, _AGAIN_S = 20, 0.5  # an actor whose maker was killed is found for a while


class RayDirectory:
    """Implements Directory. Blocks, so it is for threads."""

    def __init__(self, wire_version: str = "") -> None:
        """`wire_version`: of the Deployment; releases that run side by side have one each."""
        self._name = f"oscine-weights-{wire_version}"

    def hold(self, files: list[str], address: str) -> None:
        self._ask("hold", files, address)

    def find(self, file: str, address: str, lost: str = "") -> str:
        return self._ask("find", file, address, lost) or ""

    def _ask(self, method: str, *arguments: object) -> Any:
        """None where nothing answers."""
        for _ in range(_TRIES):
            try:
                made = ray.remote(Holders).options(name=self._name, get_if_exists=True, num_cpus=0).remote()
                return ray.get(getattr(made, method).remote(*arguments), timeout=_ANSWER_S)
            except RayError:  # it ended with its maker
                time.sleep(_AGAIN_S)
        return None
