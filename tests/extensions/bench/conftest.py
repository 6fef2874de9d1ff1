"""Undoes the changes of the command to its process."""

import pytest

from tests.web.conftest import browser, context_options

__all__ = ["browser", "context_options"]


@pytest.fixture
def waiting_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets it for the threads to come; it goes with the test."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
