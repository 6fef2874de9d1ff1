"""Published test sets as tasks: GPQA Diamond, AIME 2025 and MMLU, from their files on the Hugging Face hub.

The files are CSV and JSON lines: MMLU's Parquet files would need another package, so its archive of CSV is read.
"""

import csv
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from oscine.extensions.eval.task import Task, TaskError

LETTERS = "ABCD"
_LETTER = "End with one line of the form `Answer: X`, where X is the letter of the right choice."
_INTEGER = "The result is a whole number from 0 to 999. End with one line of the form `Answer: N`."
_GPQA_COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_SUBJECT = re.compile(r"(?:.*/)?test/(\w+)_test\.csv")


class Published(NamedTuple):
    repository: str
    file: str
    read: Callable[[Path], Iterable[dict[str, Any]]]  # objects of task lines; raises TaskError, KeyError, ValueError


def load(name: str) -> list[Task]:
    """The tasks of a set of SETS. Raises ValueError if the hub does not give its file, or if the file is another."""
    from oscine.checkpoint.hub import fetch_data

    published = SETS[name]
    path = fetch_data(published.repository, published.file)
    try:
        tasks = [Task.of(line) for line in published.read(path)]
    except (KeyError, TypeError, ValueError, csv.Error, tarfile.TarError) as error:
        why = f"no column {error}" if isinstance(error, KeyError) else error
        raise TaskError(f"{path}: not the file of {name}: {why}") from None
    if not tasks:
        raise TaskError(f"{path}: not the file of {name}: it has no tasks")
    return tasks


def _question(text: str, choices: Iterable[str]) -> str:
    listed = "\n".join(f"{letter}) {choice.strip()}" for letter, choice in zip(LETTERS, choices, strict=True))
    return f"{text.strip()}\n\n{listed}\n\n{_LETTER}"


def read_gpqa(path: Path) -> Iterator[dict[str, Any]]:
    """The right choice is the first one of the file. Here its place depends on a hash of the question."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            text, right, *wrong = (row[column] for column in _GPQA_COLUMNS)
            digest = hashlib.sha256(text.encode()).digest()
            place = digest[0] % len(LETTERS)
            yield {
                "id": f"gpqa/{row.get('Record ID') or digest.hex()[:12]}",
                "group": f"gpqa/{row.get('High-level domain') or 'all'}",
                "prompt": _question(text, [*wrong[:place], right, *wrong[place:]]),
                "answer": {"choice": LETTERS[place], "choices": len(LETTERS)},
            }


def read_aime(path: Path) -> Iterator[dict[str, Any]]:
    """An answer may have a unit, such as degrees; its first digits are the number."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        row = json.loads(line)
        digits = re.search(r"\d+", str(row["answer"]))
        if digits is None:
            raise ValueError(f"line {number} has no number as its answer")
        yield {
            "id": f"aime/{row.get('id', number)}",
            "group": "aime",
            "prompt": f"{row['problem'].strip()}\n\n{_INTEGER}",
            "answer": {"number": int(digits[0])},
        }


def read_mmlu(path: Path) -> Iterator[dict[str, Any]]:
    """An archive of a CSV file per subject, without a header: the question, four choices, the letter."""
    with tarfile.open(path) as archive:
        for member in archive:
            found = _SUBJECT.fullmatch(member.name)
            if found is None or (file := archive.extractfile(member)) is None:
                continue
            rows = csv.reader(io.TextIOWrapper(file, encoding="utf-8", newline=""))
            for number, (text, *choices, letter) in enumerate(rows, 1):
                yield {
                    "id": f"mmlu/{found[1]}/{number}",
                    "group": f"mmlu/{found[1]}",
                    "prompt": _question(text, choices),
                    "answer": {"choice": letter.strip(), "choices": len(LETTERS)},
                }


SETS = {
    "gpqa": Published("Idavidrein/gpqa", "gpqa_diamond.csv", read_gpqa),
    "aime": Published("math-ai/aime25", "test.jsonl", read_aime),
    "mmlu": Published("cais/mmlu", "data.tar", read_mmlu),
}
