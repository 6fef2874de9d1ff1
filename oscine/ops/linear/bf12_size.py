"""How large weights in 12 bits are (hopper_bf12.py). Memory plans are made without torch."""

WORDS = 3  # of a thread and atom
ROWS, COLUMNS = 64, 16  # of an atom


def bf12_bytes(rows: int, columns: int) -> int:
    """Bytes of words and scales; 0 for a matrix that has no form in 12 bits."""
    return 0 if rows % ROWS or columns % COLUMNS else rows * columns * WORDS // 2 + 4 * rows
