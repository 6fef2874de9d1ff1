"""The ranges of torch and Triton: pyproject.toml has them; code and documents agree with it."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from oscine.ops import triton_range

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GPUS = ROOT / "docs" / "gpus.md"
HOME = "gpus.md#torch-and-triton"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def requirements(texts: list[str]) -> dict[str, Requirement]:
    return {found.name: found for found in map(Requirement, texts)}


TORCH = requirements(PROJECT["dependencies"])["torch"].specifier
TRITON = requirements(PROJECT["optional-dependencies"]["gpu"])["triton"].specifier
CONSTRAINTS = requirements(re.findall(r"^[a-z].*", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
(PINNED,) = (Version(one.version) for one in CONSTRAINTS["torch"].specifier)


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def rows() -> Iterator[tuple[str, list[str]]]:
    """Rows of the table: a minor release of torch, and the releases of Triton that come with it."""
    section = GPUS.read_text().partition("## Torch and Triton")[2].partition("\n## ")[0]
    for torch, triton in re.findall(r"^\| (\d+\.\d+) \| ([^|]*) \|", section, re.MULTILINE):
        yield torch, re.findall(r"\d+\.\d+\.\d+", triton)


def test_the_code_has_the_ranges_of_the_project() -> None:
    assert SpecifierSet(triton_range.TORCH) == TORCH
    assert SpecifierSet(triton_range.TRITON) == TRITON


@pytest.mark.parametrize("version", ["3.5.9", "3.6.0", "3.7.1", "3.8.0", "3.9.0", "3.9.99", "3.10.0", "4.0.0"])
def test_an_engine_accepts_the_triton_that_pip_accepts(version: str) -> None:
    assert triton_range.is_tested(version) is (version in TRITON)


def test_the_constraints_lie_in_the_ranges() -> None:
    assert PINNED in TORCH
    assert "triton" not in CONSTRAINTS  # each torch asks for its own


def test_the_container_has_the_torch_of_the_constraints() -> None:
    text = (ROOT / "deploy" / "container" / "Containerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install .*", text)
    assert len(installs) == 4
    assert all("--constraint constraints.txt" in line for line in installs)
    assert not re.search(r"(torch|triton)\s*[=<>~]", text)
    page = (ROOT / "docs" / "containers.md").read_text()
    (triton,) = dict(rows())[minor(str(PINNED))]
    assert f"torch {PINNED} with CUDA, Triton {triton}" in page


def test_the_table_has_every_release_of_the_ranges_and_no_other() -> None:
    found = dict(rows())
    first, last = min(found, key=Version), max(found, key=Version)
    assert [f"2.{number}" for number in range(Version(first).minor, Version(last).minor + 1)] == [*found]
    assert all(f"{torch}.0" in TORCH for torch in found)
    assert f"2.{Version(first).minor - 1}.0" not in TORCH
    assert f"2.{Version(last).minor + 1}.0" not in TORCH
    versions = [version for tritons in found.values() for version in tritons]
    assert all(version in TRITON for version in versions)
    oldest, untested = triton_range.OLDEST, triton_range.UNTESTED
    assert {minor(version) for version in versions} == {f"3.{number}" for number in range(oldest[1], untested[1])}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_names_no_other_range(path: Path) -> None:
    for name, given in re.findall(r"\b(torch|triton)([<>=~][^'`\" |]*)", path.read_text()):
        assert SpecifierSet(given) == (TORCH if name == "torch" else TRITON)


@pytest.mark.parametrize("name", ["README.md", "docs/containers.md", "docs/troubleshooting.md"])
def test_pages_about_installing_lead_to_the_table(name: str) -> None:
    assert HOME in (ROOT / name).read_text()
