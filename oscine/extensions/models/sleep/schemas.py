"""Records of the answers about the models of a server."""

from msgspec import Struct


class SleepQuery(Struct):
    level: int = 1
    mode: str = "wait"
    model: str | None = None  # a server with one model needs none


class WakeQuery(Struct):
    model: str | None = None


class Sleeping(Struct):
    is_sleeping: bool
