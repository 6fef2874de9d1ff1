"""Compiles the library ahead, for machines without a C compiler: `python -m oscine.ops.native.ahead`.

It writes a file per level of instructions into the package. The container image is built in this way.
"""

from pathlib import Path

from oscine.ops.native.levels import BUILT, Level, levels
from oscine.ops.native.library import FLAGS, NATIVE, compile_library, find_compiler


def compile_ahead(level: Level, folder: Path = BUILT) -> Path:
    """Raises NoLibrary."""
    folder.mkdir(exist_ok=True)
    flags = (*(flag for flag in FLAGS if flag != NATIVE), *level.flags)
    return compile_library(find_compiler(), folder / level.file, flags)


if __name__ == "__main__":
    for level in levels():
        print(compile_ahead(level))
