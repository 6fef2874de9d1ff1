"""How elements of keys and values are stored."""

from enum import StrEnum


class KVDtype(StrEnum):
    """The value is torch's name of the type of an element."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    UINT8 = "uint8"  # pages whose content nobody reads: of executors without a model
    FP8 = "float8_e4m3fn"  # with a scale per token and head, in the same page (docs/decisions/0028)

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"keys and values cannot be {value}: only {', '.join(cls)}")

    @property
    def element_bytes(self) -> int:
        return _BYTES[self]

    @property
    def has_scales(self) -> bool:
        """Whether pages hold scales too. The memory of such a page is bytes."""
        return self is KVDtype.FP8

    @property
    def stored_as(self) -> str:
        """The type of the memory, by torch's name."""
        return "uint8" if self.has_scales else self.value

    def rows(self, page_size: int, head_dim: int) -> int:
        """Rows of `head_dim` elements of a head in a page: one for each token, then the scales."""
        return rows_with_scales(page_size, head_dim) if self.has_scales else page_size

    def describe(self, name: str) -> str:
        """For people, where not all are alike: the name of pages of this type."""
        return f"{name} in FP8" if self is KVDtype.FP8 else name


_BYTES = {
    KVDtype.FLOAT32: 4,
    KVDtype.BFLOAT16: 2,
    KVDtype.FLOAT16: 2,
    KVDtype.UINT8: 1,
    KVDtype.FP8: 1,
}


def rows_with_scales(page_size: int, head_dim: int) -> int:
    """One row of `head_dim` bytes for each token, then whole rows with a byte of scale per token."""
    return page_size + -(-page_size // head_dim)


def tokens_of_rows(num_rows: int, head_dim: int) -> int:
    """The page size that has so many rows with scales."""
    return num_rows * head_dim // (head_dim + 1)
