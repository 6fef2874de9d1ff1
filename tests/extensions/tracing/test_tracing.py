"""Traces: if they are off, nothing is loaded; if they are on and cannot be exported, there is an error in one line."""

import subprocess
import sys

import pytest

from oscine.extensions.tracing.spans import Tracing
from oscine.system.environment import Environment

COLLECTOR = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


def test_off_costs_nothing() -> None:
    code = "import sys, oscine.api.server; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("variables", "protocol"),
    [
        ({}, None),
        (COLLECTOR, "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, "http/protobuf"),
        (COLLECTOR | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc"),
        (COLLECTOR | {"OTEL_SDK_DISABLED": "True"}, None),
        (COLLECTOR | {"OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_the_environment_turns_them_on(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], protocol: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Environment().traces == protocol


def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"oscine\[otel\]; OTEL_SDK_DISABLED=true turns them off"):
        Tracing()


def test_a_protocol_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'"):
        Tracing("grpc")
