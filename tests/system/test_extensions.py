"""Extensions that may be missing."""

from importlib.machinery import ModuleSpec

import pytest

from oscine.system import extensions
from oscine.system.extensions import is_there, lacking

pytestmark = pytest.mark.needs("replicas", "cluster")
CLUSTER = "oscine.extensions.cluster.cli.command:arguments"


def test_an_extension_needs_those_that_its_needs_name(monkeypatch: pytest.MonkeyPatch) -> None:
    find = extensions.find_spec

    def without_events(name: str) -> ModuleSpec | None:
        return None if name.startswith("oscine.extensions.kv_events") else find(name)

    assert is_there(CLUSTER)
    monkeypatch.setattr(extensions, "find_spec", without_events)
    for place in (CLUSTER, "oscine.extensions.replicas.data_parallel:add_engines"):
        assert not is_there(place)
        assert lacking(place) == "needs the extension kv_events"
    assert is_there("oscine.extensions.terminal.command:arguments")
