"""`bench serve` finds the energy of all GPUs in the metrics of a server."""

from pathlib import Path

import pytest

from oscine.api.telemetry.energy import EnergyCollector
from oscine.extensions.bench.serve.target import _ENERGY, sum_of
from tests.nvml_library import compile_nvml, needs_compiler
from tests.test_nvml import scrape


@needs_compiler
def test_the_energy_of_all_gpus_is_added_up(tmp_path: Path) -> None:
    collector = EnergyCollector(lambda: ["GPU-a", "GPU-b"], compile_nvml(tmp_path))
    before, after = (sum_of(scrape(collector), _ENERGY) for _ in range(2))
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(25)
