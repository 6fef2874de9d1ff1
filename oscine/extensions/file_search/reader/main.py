"""The process that reads files: jobs come in as lines of JSON, and chunks go out as such lines.

It has no access to the database. A file that takes too much memory or time ends this process, and nothing else.
"""

import os
import resource
import sys
from functools import lru_cache
from pathlib import Path

import msgspec

from oscine.chat.tokenizer import EncodingError, Tokenizer
from oscine.extensions.file_search.reader.cut import chunks
from oscine.extensions.file_search.reader.extract import UnreadableError, pieces
from oscine.extensions.file_search.reader.messages import Job, Told

_MEMORY = 2 << 30  # bytes of data
_CPU_S = 600  # per file
_PER_LINE = 16  # chunks
_NICE = 10


def _read(job: Job, tokenizer: Tokenizer) -> None:
    waiting: list[str] = []
    empty = True
    for chunk in chunks(pieces(Path(job.path), job.filename), tokenizer, job.chunk_tokens, job.overlap_tokens):
        if chunk.isspace():
            continue
        empty = False
        waiting.append(chunk)
        if len(waiting) == _PER_LINE:
            _tell(Told(waiting))
            waiting = []
    if empty:
        raise UnreadableError("invalid_file", "The file has no text.")
    _tell(Told(waiting, done=True))


def _tell(told: Told) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()


def _limit_cpu() -> None:
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + _CPU_S, hard))


def main() -> None:
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    tokenizer_of = lru_cache(1)(Tokenizer)
    for line in sys.stdin.buffer:
        _limit_cpu()
        job = msgspec.json.decode(line, type=Job)
        try:
            _read(job, tokenizer_of(job.tokenizer))
        except UnreadableError as error:
            _tell(Told([], error.code, error.message, done=True))
        except OSError as error:
            _tell(Told([], "server_error", f"The file cannot be opened: {error.strerror}.", done=True))
        except EncodingError:
            _tell(Told([], "invalid_file", "The model's tokenizer fails on the text of the file.", done=True))
        except MemoryError:
            _tell(Told([], "invalid_file", "Reading the file takes too much memory.", done=True))


if __name__ == "__main__":
    main()
