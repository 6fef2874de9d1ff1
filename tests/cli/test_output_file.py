"""Whether the file of an option can be written is known before the work, and nothing is left behind."""

import os
from pathlib import Path

import pytest

from oscine.cli.error import USAGE, CommandError
from oscine.cli.output_file import check_output


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "old"
    file.write_text("text")
    check_output(file)
    assert file.read_text() == "text"
    check_output(tmp_path / "new")
    check_output(tmp_path / "a" / "b" / "new", make_folders=True)
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    check_output(tmp_path / "link")
    assert {one.name for one in tmp_path.iterdir()} == {"old", "link"}
    check_output(Path(os.devnull))


@pytest.mark.parametrize(
    ("name", "make_folders", "why"),
    [
        ("", False, "Is a directory"),
        ("absent/x", False, "No such file or directory"),
        ("file/x", False, "Not a directory"),
        ("file/a/x", True, "Not a directory"),
        ("a/" + "x" * 300, True, "File name too long"),
        ("zero\0", False, "embedded null"),
    ],
)
def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, name: str, make_folders: bool, why: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / name
    with pytest.raises(CommandError) as error:
        check_output(path, "table", make_folders=make_folders)
    assert str(error.value).startswith(f"--table {path}: no file can be written there: ")
    assert why in str(error.value)
    assert error.value.status == USAGE
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
