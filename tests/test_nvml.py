"""Energy counters: the binding against a library with NVML's functions, the metric, and machines without NVML."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from oscine.api.telemetry.energy import EnergyCollector
from oscine.executor.start.build import _uuids
from oscine.system.nvml import Energy, energy_counters
from tests.nvml_library import JOULES, compile_nvml, needs_compiler


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    return compile_nvml(tmp_path_factory.mktemp("nvml"))


@needs_compiler
def test_counters_are_read_by_uuid(library: str) -> None:
    """64 bits of millijoules become joules. A GPU without a counter, or that is not there, has none."""
    first, second = energy_counters(["GPU-b", "GPU-none", "GPU-old", "GPU-a"], library)
    assert (first.gpu, second.gpu) == (1, 0)
    for counter, name, least in ((first, "GPU-b", 2**40 / 1e3), (second, "GPU-a", 123.456)):
        before, after = counter.joules(), counter.joules()
        assert before is not None
        assert after is not None
        assert before > least
        assert after - before == pytest.approx(JOULES[name])


@needs_compiler
def test_the_energy_of_several_gpus_is_added_up_or_not_known(library: str) -> None:
    both = Energy(["GPU-a", "GPU-b"], library)
    before, after = both.joules(), both.joules()
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(25)
    for partial in (["GPU-a", "GPU-old"], ["GPU-a", "GPU-none"], []):
        assert Energy(partial, library).joules() is None


@needs_compiler
def test_a_driver_that_does_not_answer(tmp_path: Path) -> None:
    assert energy_counters(["GPU-a"], compile_nvml(tmp_path, status=9)) == []


def test_without_nvml_there_is_nothing() -> None:
    assert energy_counters(["GPU-a"], "libno-such-nvml.so.1") == []
    assert Energy(["GPU-a"], "libno-such-nvml.so.1").joules() is None


def scrape(collector: EnergyCollector) -> str:
    registry = CollectorRegistry()
    registry.register(collector)
    asyncio.run(collector.refresh())
    return generate_latest(registry).decode()


def joules(text: str) -> float:
    return sum(
        float(line.split(" ")[1]) for line in text.splitlines() if line.startswith("oscine:energy_joules_total{")
    )


@needs_compiler
def test_the_metric_is_a_counter_per_gpu(library: str) -> None:
    """Two models on one GPU use it once."""
    used = ["GPU-a", "GPU-b", "GPU-a", "GPU-old"]
    collector = EnergyCollector(lambda: used, library)
    before, after = scrape(collector), scrape(collector)
    samples = [line for line in after.splitlines() if line.startswith("oscine:")]
    assert [line.split(" ")[0] for line in samples] == [f'oscine:energy_joules_total{{gpu="{gpu}"}}' for gpu in (0, 1)]
    assert joules(after) - joules(before) == pytest.approx(25)
    used[:] = ["GPU-a"]  # an engine has ended
    assert scrape(collector).count("\noscine:energy_joules_total{") == 1
    used.clear()
    assert "energy" not in scrape(collector)


def test_without_nvml_there_is_no_metric() -> None:
    assert scrape(EnergyCollector(lambda: ["GPU-a"], "libno-such-nvml.so.1")) == ""
    assert scrape(EnergyCollector(lambda: [])) == ""


def test_a_cpu_is_no_gpu() -> None:
    assert _uuids(["cpu", "cpu"]) == ()
