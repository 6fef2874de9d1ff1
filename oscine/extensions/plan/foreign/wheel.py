"""The tables of ops in a wheel of NVIDIA's AISimulate (Apache-2.0). Needs pyarrow: `pip install oscine[plan]`.

systems/SYSTEM.yaml                                        constants of a GPU
systems/data/SYSTEM/OP/FRAMEWORK/VERSION/TABLE.parquet     times in milliseconds
systems/data/SYSTEM/OP/FRAMEWORK/VERSION/reuse.yaml        rows that another version has in addition
"""

import hashlib
import io
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

Row = dict[str, Any]
_ROOT = "aisimulate_core/systems"
# The tables of a version that has no directory of its own are those of the newest older one that has.
_TABLES = {
    "gemm": "gemm_perf",
    "moe": "moe_perf",
    "generation_attention": "generation_attention_perf",
    "context_attention": "context_attention_perf",
    "custom_allreduce": "custom_allreduce_perf",
}
_FOLDERS = {"generation_attention": "attention", "context_attention": "attention", "custom_allreduce": "comm"}


class Wheel:
    def __init__(self, path: Path) -> None:
        """Raises ValueError and OSError."""
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            raise ValueError("importing tables needs pyarrow: pip install 'oscine[plan]'") from None
        self._parquet = parquet
        with path.open("rb") as file:
            self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        try:
            self._zip = zipfile.ZipFile(path)
        except zipfile.BadZipFile:
            raise ValueError(f"{path} is no wheel") from None
        self.name = path.name
        self._names = set(self._zip.namelist())
        if not any(name.startswith(f"{_ROOT}/data/") for name in self._names):
            raise ValueError(f"{path} has no tables of AISimulate")

    @property
    def systems(self) -> list[str]:
        start = f"{_ROOT}/data/"
        return sorted({name.removeprefix(start).partition("/")[0] for name in self._names if name.startswith(start)})

    def constants(self, system: str) -> dict[str, Any]:
        """Raises ValueError for an unknown system."""
        if system not in self.systems:
            raise ValueError(f"--system {system}: the wheel has {', '.join(self.systems)}")
        found: dict[str, Any] = yaml.safe_load(self._zip.read(f"{_ROOT}/{system}.yaml"))
        return found

    def versions(self, system: str, op: str, framework: str) -> list[str]:
        start, table = f"{_ROOT}/data/{system}/{_FOLDERS.get(op, op)}/{framework}/", _TABLES[op]
        found = {name.removeprefix(start) for name in self._names if name.startswith(start)}
        return sorted((name.partition("/")[0] for name in found if name.endswith(f"/{table}.parquet")), key=_order)

    def rows(self, system: str, op: str, framework: str, version: str) -> list[Row]:
        """Of this version and those that it reuses, else of the newest older version. [] if there is none."""
        known = self.versions(system, op, framework)
        if version not in known:
            older = [one for one in known if _order(one) < _order(version)]
            return self.rows(system, op, framework, older[-1]) if older else []
        folder = f"{_ROOT}/data/{system}/{_FOLDERS.get(op, op)}/{framework}/{version}"
        found = self._read(f"{folder}/{_TABLES[op]}.parquet")
        reuse = f"{folder}/reuse.yaml"
        if reuse in self._names:
            for one in yaml.safe_load(self._zip.read(reuse))["reuse"]:
                other = f"{_ROOT}/data/{system}/{_FOLDERS.get(op, op)}/{framework}/{one['from_version']}"
                if one["table"] == _TABLES[op]:
                    found = _with(found, self._read(f"{other}/{_TABLES[op]}.parquet"))
        return found

    def _read(self, name: str) -> list[Row]:
        rows: list[Row] = self._parquet.read_table(io.BytesIO(self._zip.read(name))).to_pylist()
        return rows


def _with(rows: list[Row], others: Iterable[Row]) -> list[Row]:
    """The rows, and those of the others whose key is not among them."""
    apart = ("latency", "power", "version", "kernel_source")

    def key(row: Row) -> frozenset[tuple[str, Any]]:
        return frozenset((name, value) for name, value in row.items() if name not in apart)

    known = {key(row) for row in rows}
    return rows + [row for row in others if key(row) not in known]


def _order(version: str) -> list[tuple[int, str]]:
    """Versions in the order of their numbers: 1.3.0rc9 before 1.3.0rc10."""
    parts = version.replace("rc", ".").replace("post", ".").split(".")
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
