"""The tables of ops in a wheel of NVIDIA's AISimulate (Apache-2.0). Needs pyarrow: `pip install oscine[plan]`.

systems/SYSTEM.yaml                                        constants of a GPU
systems/data/SYSTEM/OP/FRAMEWORK/VERSION/TABLE.parquet     times in milliseconds
systems/data/SYSTEM/OP/FRAMEWORK/VERSION/reuse.yaml        rows that another version has in addition
"""

import hashlib
import io
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

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
_ATTENTION = ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "window_size", "kv_cache_dtype")
_COLUMNS = {
    "gemm": ("gemm_dtype", "m", "n", "k"),
    "moe": ("moe_dtype", "distribution", "hidden_size", "num_experts", "num_tokens", "moe_tp_size", "moe_ep_size"),
    "generation_attention": (*_ATTENTION, "step", "device"),
    "context_attention": _ATTENTION,
    "custom_allreduce": ("num_gpus", "message_size"),
}
_FOLDERS = {"generation_attention": "attention", "context_attention": "attention", "custom_allreduce": "comm"}


class Constants(NamedTuple):
    """Of a GPU, and of the machine around it."""

    bytes_per_s: float
    flops_per_s: float
    memory_bytes: int
    watts: float
    gpus_per_node: int
    link_bytes_per_s: float


class Wheel:
    """An open wheel."""

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

    def constants(self, system: str) -> Constants:
        """Raises ValueError for an unknown system, or if the wheel is damaged."""
        if system not in self.systems:
            raise ValueError(f"--system {system}: the wheel has {', '.join(self.systems)}")
        name = f"{_ROOT}/{system}.yaml"
        with self._reading(name):
            values = yaml.safe_load(self._zip.read(name))
            gpu, node = values["gpu"], values["node"]
            return Constants(
                bytes_per_s=float(gpu["mem_bw"]),
                flops_per_s=float(gpu["bfloat16_tc_flops"]),
                memory_bytes=int(gpu["mem_capacity"]),
                watts=float(gpu["power"]),
                gpus_per_node=int(node["num_gpus_per_node"]),
                link_bytes_per_s=float(node["intra_node_bw"]),
            )

    def versions(self, system: str, op: str, framework: str) -> list[str]:
        """Those that have a table of the op, oldest first."""
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
        found = self._read(f"{folder}/{_TABLES[op]}.parquet", op)
        reuse = f"{folder}/reuse.yaml"
        if reuse in self._names:
            with self._reading(reuse):
                listed = yaml.safe_load(self._zip.read(reuse))["reuse"]
                versions = [one["from_version"] for one in listed if one["table"] == _TABLES[op]]
            for other in versions:
                found = _with(found, self._read(f"{folder.removesuffix(version)}{other}/{_TABLES[op]}.parquet", op))
        return found

    def _read(self, name: str, op: str) -> list[Row]:
        with self._reading(name):
            rows: list[Row] = self._parquet.read_table(io.BytesIO(self._zip.read(name))).to_pylist()
            if missing := sorted({*_COLUMNS[op], "latency"} - rows[0].keys()) if rows else ["rows"]:
                raise ValueError(f"it has no {', '.join(missing)}")
            if not all(row["latency"] for row in rows):
                raise ValueError("it has rows without latency")
        return rows

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Raises ValueError that names the file, if it is not as it should be."""
        try:
            yield
        except (KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error, yaml.YAMLError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
            raise ValueError(f"{self.name}: {name} is damaged: {what}") from None


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
