"""Overlays and chart against the schemas of several releases of Kubernetes, none of whose fields is unknown there."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.manifests import CHART, CHECKERS, write_all

VALIDATE = CHECKERS / "kubernetes-validate"
OLDEST, IMAGE_VOLUMES, NEWEST = "1.27.0", "1.35.0", "1.37.0"
pytestmark = pytest.mark.skipif(not VALIDATE.exists(), reason="there are no schemas of Kubernetes: make checkers")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("manifests")
    write_all(folder)
    return sorted(folder.iterdir())


def faults(files: list[Path], release: str) -> str:
    """What does not fit the release; empty if all does."""
    command = [str(VALIDATE), "--strict", "--quiet", "--kubernetes-version", release, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr or "failed"


@pytest.mark.parametrize("release", [IMAGE_VOLUMES, NEWEST])
def test_all_objects_fit_the_release(files: list[Path], release: str) -> None:
    assert faults(files, release) == ""


def test_all_but_image_volumes_fits_the_oldest_release_that_the_chart_names(files: list[Path]) -> None:
    assert f'"{CHART.facts["kubeVersion"]}"' == f'">={OLDEST}-0"'
    newer = [file for file in files if "reference:" in file.read_text()]
    assert faults([file for file in files if file not in newer], OLDEST) == ""
    assert "'image' was unexpected" in faults(newer, OLDEST)


def test_a_misspelt_field_fits_no_release(tmp_path: Path) -> None:
    budget = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "a"}}
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump(budget | {"spec": {"maxUnavailabel": 1}}))
    assert "maxUnavailabel" in faults([file], NEWEST)
