"""The file of keys: an error names its place in one line, and shows no key."""

from pathlib import Path

import pytest

from oscine.api.common.keys import ApiKeys
from oscine.settings.config import ServerOptions

DIGEST = "a" * 64


def read(tmp_path: Path, text: str, *plain: str) -> ApiKeys:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return ApiKeys(ServerOptions(api_keys=plain, api_keys_file=str(path)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- {name: a, key: secret}\n- {", "is not YAML (line 2)"),
        ("- {name: a, key: 2024-99-99}", "is not YAML"),
        ("name: a", "must be a list of keys: Expected `array`"),
        ("- {key: secret}", "required field `name`"),
        ("- {name: a, key: secret, rpm: 5}", "unknown field `rpm`"),
        (
            "- {name: a, key: secret, requests_per_minute: many}",
            r"`int | null`, got `str` - at `\$[0].requests_per_minute`",
        ),
        ("- {name: a, key: secret, max_parallel: 0}", "'a': a limit must be at least 1"),
        ("- {name: a}", "'a': give either 'key' or 'sha256'"),
        (f"- {{name: a, key: secret, sha256: {DIGEST}}}", "'a': give either 'key' or 'sha256'"),
        ("- {name: a, key: secret, rights: [root]}", "Invalid enum value 'root' - at `$[0].rights[0]`"),
        ("- {name: a, sha256: abc}", "'a': 'sha256' must be 64 hexadecimal digits"),
        ("- {name: '', key: secret}", "a key needs a name"),
        ("- {name: a, key: secret}\n- {name: a, key: other}", "'a' is there twice"),
        ("- {name: a, key: secret}\n- {name: b, key: secret}", "two names have the same key"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert reason.replace("\\", "") in message
    assert message.startswith(f"--api-keys-file {tmp_path}/keys.yaml")
    assert "\n" not in message
    assert "secret" not in message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        ApiKeys(ServerOptions(api_keys_file=str(tmp_path / "none")))


def test_an_empty_list_locks_everybody_out(tmp_path: Path) -> None:
    keys = read(tmp_path, "[]")
    assert keys
    assert keys.find({"type": "http", "headers": []}) is None
    assert not ApiKeys(ServerOptions())


def test_a_key_of_the_file_is_none_of_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'api-key-1' is what a key of --api-key is called"):
        read(tmp_path, "- {name: api-key-1, key: other, requests_per_minute: 1}", "plain")


def test_a_key_of_an_administrator_is_no_other_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--admin-key must not be a key of --api-key"):
        ApiKeys(ServerOptions(api_keys=("one", "two"), admin_keys=("two",)))
    path = tmp_path / "keys.yaml"
    path.write_text("- {name: a, key: root}")
    with pytest.raises(ValueError, match="'a' has a key of --admin-key, but no right 'admin'"):
        ApiKeys(ServerOptions(admin_keys=("root",), api_keys_file=str(path)))
    path.write_text("- {name: a, key: root, rights: [admin]}")
    assert ApiKeys(ServerOptions(admin_keys=("root",), api_keys_file=str(path)))
    path.write_text("- {name: admin-key-1, key: other}")
    with pytest.raises(ValueError, match="'admin-key-1' is what a key of --admin-key is called"):
        ApiKeys(ServerOptions(admin_keys=("root",), api_keys_file=str(path)))


def test_a_right_may_be_given_and_taken_while_the_server_runs(tmp_path: Path) -> None:
    keys, scope = read(tmp_path, "- {name: a, key: secret}"), {"type": "http", "headers": [(b"x-api-key", b"secret")]}
    assert not keys.is_admin(scope)
    (tmp_path / "keys.yaml").write_text("- {name: a, key: secret, rights: [admin]}")
    keys.reload()
    assert keys.is_admin(scope)
    (tmp_path / "keys.yaml").write_text("- {name: a, key: secret, rights: []}")
    keys.reload()
    assert not keys.is_admin(scope)
