"""How large the head in int8 is (hopper.py). Memory plans are made without Triton."""


def screen_bytes(vocab: int, hidden: int) -> int:
    """Bytes of a Screen, at most."""
    return vocab * (hidden + 12) + 4 * hidden if hidden % 16 == 0 else 0
