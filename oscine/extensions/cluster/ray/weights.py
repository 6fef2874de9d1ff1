"""Ray actor that tells each machine where to read weights.

It has a name, and the first replica that asks for it creates it. Ray ends it with that replica. Then the next question
creates another one, which knows nothing, so some file may come from the hub once more.
"""

import logging
import threading
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from oscine.extensions.replicas.weights import Holders

logger = logging.getLogger(__name__)

_ANSWER_S = 30.0  # of all tries together; the actor may have to start first
_AGAIN_S = 0.5  # between tries: an actor whose creator was killed keeps its name for a moment
_LOOK_S = 0.2  # between looks at `stop`


class RayDirectory:
    """Implements Directory. Blocks, so it is for threads."""

    def __init__(self, wire_version: str = "", stop: threading.Event | None = None) -> None:
        """`wire_version`: of the Deployment; releases that run side by side have one each.

        `stop`: once it is set, no question waits for its answer.
        """
        self._name = f"oscine-weights-{wire_version}"
        self._stop = stop or threading.Event()
        self._lock = threading.Lock()
        self._actor: Any = None  # the creator's handle: Ray ends the actor when it is gone

    def hold(self, files: list[str], address: str) -> None:
        self._ask("hold", files, address)

    def find(self, file: str, address: str, lost: str = "") -> str:
        return self._ask("find", file, address, lost) or ""

    def _ask(self, method: str, *arguments: object) -> Any:
        """None where nothing answers."""
        end_s = time.monotonic() + _ANSWER_S
        while not self._stop.is_set():
            actor = None
            try:
                actor = self._take()
                return self._wait(getattr(actor, method).remote(*arguments), end_s)
            except RayActorError as error:  # it ended with its creator
                self._drop(actor)
                if time.monotonic() > end_s:
                    return self._give_up(error)
                self._stop.wait(_AGAIN_S)
            except RayError as error:
                return self._give_up(error)
        return None

    def _take(self) -> Any:
        with self._lock:
            if self._actor is None:
                options = ray.remote(Holders).options(name=self._name, get_if_exists=True, num_cpus=0)
                self._actor = options.remote()
            return self._actor

    def _drop(self, actor: Any) -> None:
        with self._lock:
            if self._actor is actor:
                self._actor = None

    def _wait(self, answer: Any, end_s: float) -> Any:
        while not self._stop.is_set():
            try:
                return ray.get(answer, timeout=_LOOK_S)
            except GetTimeoutError:
                if time.monotonic() > end_s:
                    raise
        return None

    def _give_up(self, error: RayError) -> None:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning("no list of the machines that have weights, so the hub is asked: %s", reason)
