"""Secrets from the environment, and a home for users without one."""

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from oscine.cli import main
from oscine.system.environment import Environment, VariableError
from oscine.system.home import give_home

SECRETS = {
    "OSCINE_API_KEY": "server_api_key",
    "OSCINE_ADMIN_KEY": "server_admin_key",
    "OPENAI_API_KEY": "api_key",
    "OSCINE_CLUSTER_KEY": "cluster_key",
}


@pytest.mark.parametrize(("name", "field"), SECRETS.items())
def test_a_line_break_at_the_end_of_a_secret_does_not_count(
    monkeypatch: pytest.MonkeyPatch, name: str, field: str
) -> None:
    for given in ("sk-1", "sk-1\n", "sk-1\r\n", " sk-1 \n\n"):
        monkeypatch.setenv(name, given)
        assert getattr(Environment(), field) == "sk-1"
    monkeypatch.setenv(name, "")
    assert not getattr(Environment(), field)
    monkeypatch.delenv(name)
    assert not getattr(Environment(), field)


@pytest.mark.parametrize("given", ["sk\n1", "a\0b".replace("\0", "\x01"), "\n", "  ", "a\x7fb", "a\udcffb"])
@pytest.mark.parametrize(("name", "field"), SECRETS.items())
def test_only_what_uses_a_malformed_secret_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, field: str, given: str
) -> None:
    monkeypatch.setenv(name, given)
    environment = Environment()
    for other in {*SECRETS.values()} - {field}:
        getattr(environment, other)
    with pytest.raises(VariableError, match=f"^{name} (is blank|has a line break)"):
        getattr(environment, field)


@pytest.mark.long
@pytest.mark.needs("formats")  # its command
def test_a_command_names_the_variable_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "two\nlines")
    assert main(["list"]) == 0
    capsys.readouterr()
    assert main(["serve", "--executor", "fake"]) == 2
    said = capsys.readouterr().err
    assert said == "oscine: error: OSCINE_API_KEY has a line break or another control character inside\n"


def no_user(number: int) -> pwd.struct_passwd:
    raise KeyError(number)


@pytest.mark.parametrize("home", [None, "", "~", "relative"])
def test_a_user_without_a_home_gets_one_in_the_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str | None
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(pwd, "getpwuid", no_user)
    monkeypatch.setenv("HOME", "is restored")
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, "relative")
    if home is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", home)
    give_home()
    own = tmp_path / f"oscine-{os.geteuid()}"
    assert Path.home() == own
    assert Environment().cache_folder == own / ".cache" / "oscine"
    assert Environment().state_folder == own / ".local" / "state"


def test_a_home_that_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    give_home()
    assert os.environ["HOME"] == "/home/me"
    monkeypatch.setenv("HOME", "")
    give_home()
    assert os.path.expanduser("~") == pwd.getpwuid(os.getuid()).pw_dir
