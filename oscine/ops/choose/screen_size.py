"""How large the head in 8 bits is (hopper.py). Memory plans are made without Triton."""


def screen_bytes(vocab: int, hidden: int) -> int:
    """Bytes of a Screen, at most."""
    return vocab * (hidden + 12) + 8 * hidden if hidden % 32 == 0 else 0
