"""Reasoning efforts: the names that clients use, and the three that the model was trained with."""

from typing import Literal, get_args

from oscine.chat.messages import ReasoningEffort

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

EFFORTS: tuple[Effort, ...] = get_args(Effort)
DEFAULT: ReasoningEffort = "medium"
_NEAREST: dict[Effort, ReasoningEffort] = {
    "none": "low",  # the model always reasons
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}


def model_effort(asked: Effort | None) -> ReasoningEffort:
    """The nearest effort that the model knows; the default if the request names none."""
    return DEFAULT if asked is None else _NEAREST[asked]
