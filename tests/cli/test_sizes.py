"""Sizes with units."""

import argparse

import pytest

from oscine.cli.serve.sizes import num_bytes, num_tokens, written


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("0", 0), ("5", 5), ("5B", 5), ("1_000", 1000), ("1GB", 10**9), ("1gb", 10**9), ("500k", 500_000)),
        *(
            ("512M", 512 << 20),
            ("1GiB", 1 << 30),
            ("1gib", 1 << 30),
            ("1 G", 1 << 30),
            ("1.5G", 3 << 29),
            ("2T", 2 << 40),
        ),
    ],
)
def test_bytes(text: str, expected: int) -> None:
    assert num_bytes(text) == expected


def test_tokens() -> None:
    assert [num_tokens(text) for text in ("131072", "128K", "128k")] == [131072, 131072, 128_000]


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "1Q", "1GBB", "0x10", "1e3"])
def test_what_is_no_size_is_said_with_examples(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"it must be a number of bytes such as .* 512M"):
        num_bytes(text)


@pytest.mark.parametrize("text", ["128KB", "128KiB", "5B"])
def test_tokens_are_no_bytes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="it must be a number of tokens"):
        num_tokens(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0"), (1000, "1000"), (32 << 20, "32MiB"), (1 << 30, "1GiB"), (1536, "1536")]
)
def test_written_as_it_is_read(size: int, text: str) -> None:
    assert written(size) == text
    assert num_bytes(text) == size
