"""--port-file: how another process learns which port a server got."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from oscine.api.port_file import PortFile
from oscine.cli.local_server import local_server
from oscine.settings.config import Config, EngineOptions, ModelOptions, ServerOptions
from tests.server import DEADLINE_S


def test_a_file_appears_as_a_whole_in_place_of_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "port"
    path.write_text("1234567\n")
    file = PortFile(str(path))
    assert not path.exists()
    file.write(80)
    file.close()
    assert path.read_text() == "80\n"
    assert os.listdir(tmp_path) == ["port"]


def test_a_server_that_never_listens_leaves_nothing_behind(tmp_path: Path) -> None:
    PortFile(str(tmp_path / "port")).close()
    assert os.listdir(tmp_path) == []


def test_a_link_leads_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("older", "missing"):
        (tmp_path / name).symlink_to(Path("folder", name))
    (tmp_path / "folder" / "older").write_text("an older and longer text\n")
    for name in ("older", "missing"):
        file = PortFile(str(tmp_path / name))
        assert not (tmp_path / name).exists(), "the port is not known yet"
        file.write(80)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "folder" / name).read_text() == "80\n"


def test_a_descriptor_keeps_what_was_written_to_it(tmp_path: Path) -> None:
    with open(tmp_path / "log", "a+") as log:
        log.write("before\n")
        log.flush()
        PortFile(f"/dev/fd/{log.fileno()}").write(80)
        log.write("after\n")
    assert (tmp_path / "log").read_text() == "before\n80\nafter\n"


def test_servers_with_one_path_do_not_disturb_each_other(tmp_path: Path) -> None:
    first, second = (PortFile(str(tmp_path / "port")) for _ in range(2))
    first.write(80)
    second.write(81)
    assert (tmp_path / "port").read_text() == "81\n"
    assert os.listdir(tmp_path) == ["port"]


def test_the_file_has_the_port_that_the_server_listens_on(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "port"
    engine = EngineOptions(model=ModelOptions(model=str(model_folder)), executor="fake")
    with local_server(Config(engine, ServerOptions(port=0, port_file=str(path)))) as url:
        port = int(path.read_text())
        assert port == urlsplit(url).port
        socket.create_connection(("127.0.0.1", port), timeout=30).close()


def test_a_named_pipe_receives_the_port(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    command = [sys.executable, "-m", "oscine", "serve", str(model_folder), "--executor", "fake", "--port", "0"]
    with subprocess.Popen([*command, "--port-file", str(path)], stderr=subprocess.DEVNULL) as process:
        port = int(path.read_text())
        socket.create_connection(("127.0.0.1", port), timeout=30).close()
        process.terminate()
        assert process.wait(timeout=DEADLINE_S) == 0
    assert path.is_fifo()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no/folder/port", "No such file or directory"),
        (".", "Is a directory"),
        ("/dev/fd/1000", "No such file or directory"),
        ("/dev/full", "No space left on device"),
    ],
)
def test_a_file_that_cannot_be_written_ends_the_start(path: str, reason: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "oscine", "serve", "--executor", "fake", "--port", "0", "--port-file", path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if "oscine: error: " in line)
    assert line == f"oscine: error: --port-file {path}: {reason}"
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []
