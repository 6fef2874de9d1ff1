"""Variables of NIM's containers."""

import pytest

from oscine.extensions.apis.conventions.nim_variables import read_variables
from oscine.settings.option import OptionError
from oscine.system.environment import Environment


def test_variables_of_nim_are_stripped_and_checked_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIM_SERVED_MODEL_NAME", "a,b\n")
    assert Environment().nim["NIM_SERVED_MODEL_NAME"] == "a,b"
    monkeypatch.setenv("NIM_MODEL_NAME", "a\nb")
    with pytest.raises(OptionError, match="NIM_MODEL_NAME has a line break"):
        read_variables(Environment().nim, lambda option, value: {option: value})
