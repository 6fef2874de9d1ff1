"""Small schemas that take long to compile."""

from typing import Any


def quartic_schema(size: int) -> dict[str, Any]:
    """Compiling takes about size ** 4: 4 s for 160 on one core, minutes for 600."""
    patterns = {f"^(a|b)*x{{{i}}}$": {"type": "integer"} for i in range(1, size + 1)}
    return {"type": "object", "patternProperties": patterns, "additionalProperties": False}
