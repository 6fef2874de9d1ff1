"""What the server and the process that reads files tell each other, as lines of JSON."""

from typing import Literal

from msgspec import Struct

ErrorCode = Literal["server_error", "unsupported_file", "invalid_file"]


class Job(Struct):
    tokenizer: str  # path of its file
    path: str
    filename: str
    chunk_tokens: int
    overlap_tokens: int


class Told(Struct):
    texts: list[str]  # the next chunks
    code: ErrorCode | None = None  # why the file cannot be read
    message: str = ""
    done: bool = False  # whether it is the last line of the file
