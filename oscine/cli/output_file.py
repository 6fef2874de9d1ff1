"""Whether the file of an option can be written, asked before the work whose result it is to have."""

import os
from contextlib import suppress
from pathlib import Path

from oscine.cli.error import USAGE, CommandError


def check_output(path: Path, name: str = "output", *, make_folders: bool = False) -> None:
    """Raises CommandError if the file of option `name` cannot be written. Leaves nothing behind.

    `make_folders`: the command makes the folders of the file.
    """
    try:
        _try_to_write(Path(os.path.realpath(path)), make_folders=make_folders)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise CommandError(f"--{name} {path}: no file can be written there: {why}", USAGE) from None


def _try_to_write(file: Path, *, make_folders: bool) -> None:
    """`file`: without links, since one to no file does not exist."""
    if file.exists():
        if file.is_file() or file.is_dir():
            file.open("ab").close()
        elif not os.access(file, os.W_OK):  # opening a pipe would wait for its reader
            raise PermissionError(None, "Permission denied")
        return
    missing = [folder for folder in file.parents if not folder.exists()] if make_folders else []
    made = list[Path]()
    try:
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            made.append(folder)
        file.open("xb").close()
        file.unlink()
    finally:
        for folder in reversed(made):
            with suppress(OSError):  # others use it by now
                folder.rmdir()
