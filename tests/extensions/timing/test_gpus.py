"""GPUs and links as described by a fake NVML, a library that is compiled here."""

from pathlib import Path

import pytest

from oscine.extensions.timing.gpus import describe_gpus
from oscine.extensions.timing.table import shipped_tables
from oscine.system.environment import Environment
from tests.nvml_library import compile_h100, compile_nvml, needs_compiler

pytestmark = needs_compiler
GIB = 1 << 30


def test_a_gpu_is_known_by_its_clocks_and_widths(tmp_path: Path) -> None:
    """The table that was measured on this chip has the same figures."""
    found = describe_gpus(2, None, library=compile_h100(tmp_path))
    assert found is not None
    first, second = found.gpus
    assert (first.name, first.total, first.capability) == ("NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0))
    assert second.free == first.free - 1
    assert first.bytes_per_s == pytest.approx(3.35e12, rel=0.01), "as the maker says"
    assert first.flops_per_s == pytest.approx(989e12 * 1980 / 1830, rel=0.01), "as the maker says, at the highest clock"
    [header] = {(t.header.bytes_per_s, t.header.flops_per_s) for t in shipped_tables() if t.header.gpu == first.name}
    assert (found.chip.bytes_per_s, found.chip.flops_per_s) == pytest.approx(header, rel=0.01)


def test_links_are_nvlink_or_pcie_or_none(tmp_path: Path) -> None:
    def link(**facts: bool) -> tuple[str, float] | None:
        found = describe_gpus(2, None, library=compile_h100(tmp_path, **facts))
        assert found is not None
        return None if found.link is None else (found.link.name, found.link.bytes_per_s)

    measured = {t.header.link_bytes_per_s for t in shipped_tables() if t.header.num_gpus == 2}
    assert link() == ("NVLink", pytest.approx(max(measured), rel=0.01))
    assert link(links=False) == link(), "as many as there can be, where the driver does not say"
    assert link(nvlink=False) == ("PCIe", 48e9)
    assert link(peer=False, nvlink=False) is None


def test_one_pair_without_peer_access_means_no_link(tmp_path: Path) -> None:
    library = compile_h100(tmp_path)
    for count, visible, linked in ((3, None, True), (4, None, False), (2, "2,3", False), (2, "GPU-1, GPU-2", True)):
        found = describe_gpus(count, visible, library=library)
        assert found is not None
        assert len(found.gpus) == count
        assert (found.link is not None) == linked


def test_peer_access_can_be_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = compile_h100(tmp_path)
    found = describe_gpus(2, None, peer_access=False, library=library)
    assert found is not None
    assert found.link is None
    monkeypatch.delenv("OSCINE_NO_PEER_ACCESS", raising=False)
    assert not Environment().no_peer_access
    monkeypatch.setenv("OSCINE_NO_PEER_ACCESS", "1")
    assert Environment().no_peer_access


def test_gpus_are_those_that_are_visible(tmp_path: Path) -> None:
    library = compile_h100(tmp_path)
    everything = describe_gpus(None, None, library=library)
    some = describe_gpus(None, "3,1", library=library)
    assert everything is not None
    assert some is not None
    assert some.gpus == (everything.gpus[3], everything.gpus[1])
    assert describe_gpus(2, "1,9,2", library=library) is None, "CUDA sees one of them"
    assert describe_gpus(2, "GPU-7", library=library) is None
    assert describe_gpus(5, None, library=library) is None
    assert describe_gpus(None, "", library=library) is None


def test_a_driver_that_reports_too_little_counts_as_none(tmp_path: Path) -> None:
    assert describe_gpus(2, None, library=compile_h100(tmp_path, memory=False)) is None
    assert describe_gpus(1, None, library=compile_nvml(tmp_path)) is None, "it lacks the functions"
    assert describe_gpus(1, None, library=compile_nvml(tmp_path, 9)) is None
    assert describe_gpus(1, None, library=str(tmp_path / "no-such-library.so")) is None
