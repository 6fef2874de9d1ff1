"""Compiles the library ahead, for machines without a C compiler: `python -m oscine.ops.native.ahead`.

It writes a file per level of instructions into the package. The container image is built in this way.
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from oscine.ops.native.levels import BUILT, Level, levels
from oscine.ops.native.library import FLAGS, NATIVE, compile_library, find_compiler
from oscine.system.owned_folder import complete_file


def compile_ahead(level: Level, folder: Path = BUILT) -> Path:
    """Raises NoLibrary."""
    flags = (*(flag for flag in FLAGS if flag != NATIVE), *level.flags)
    with TemporaryDirectory() as work:
        library = compile_library(find_compiler(), Path(work), flags)
    folder.mkdir(exist_ok=True)
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with complete_file(parent, level.file) as file:
            os.fchmod(file.fileno(), 0o644)  # for all users of the package
            file.write(library)
    finally:
        os.close(parent)
    return folder / level.file


if __name__ == "__main__":
    for level in levels():
        print(compile_ahead(level))
