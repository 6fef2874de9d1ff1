"""Every environment variable that Oscine reads. Nothing else reads the environment."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LEAST_KEY = 32  # characters of a cluster's key


def _variable(name: str, default: Any = None) -> Any:
    return field(default_factory=lambda: os.environ.get(name, default))


def _stripped(name: str) -> str | None:
    """Without the line break that echo or an editor has left at its end."""
    return os.environ.get(name, "").strip() or None


def _flag(name: str) -> Any:
    return field(default_factory=lambda: os.environ.get(name, "") not in ("", "0"))


class VariableError(ValueError):
    """A variable whose value cannot be used. One line that names it."""


def _secret(name: str) -> str | None:
    """Stripped; None if it is not set. Raises VariableError."""
    value = _stripped(name)
    if os.environ.get(name) and value is None:
        raise VariableError(f"{name} is blank: give it a key, or unset it")
    if value is not None and not value.isprintable():
        raise VariableError(f"{name} has a line break or another control character inside")
    return value


@dataclass(frozen=True)
class Environment:
    """The values at the time of construction."""

    base_url: str | None = field(default_factory=lambda: _stripped("OSCINE_URL"))  # the server that `oscine chat` asks
    visible_gpus: str | None = _variable("CUDA_VISIBLE_DEVICES")  # None: all GPUs
    no_color: str | None = _variable("NO_COLOR")
    untested_triton: bool = _flag("OSCINE_UNTESTED_TRITON")  # a GPU is used with a Triton that was not tested
    no_peer_access: bool = _flag("OSCINE_NO_PEER_ACCESS")  # as if no GPU had access to the memory of another
    omp_num_threads: str | None = _variable("OMP_NUM_THREADS")  # threads that compute on a CPU
    cache_home: str | None = _variable("XDG_CACHE_HOME")

    @property
    def api_key(self) -> str | None:
        """Sent by `oscine chat` and other clients. Raises VariableError."""
        return _secret("OPENAI_API_KEY")

    @property
    def server_api_key(self) -> str | None:
        """One more key that a server accepts. Raises VariableError."""
        return _secret("OSCINE_API_KEY")

    @property
    def server_admin_key(self) -> str | None:
        """One more key with the right `admin`. Raises VariableError."""
        return _secret("OSCINE_ADMIN_KEY")

    @property
    def embeddings_key(self) -> str | None:
        """Sent to the server of --embeddings-url. Raises VariableError."""
        return _secret("OSCINE_EMBEDDINGS_KEY")

    @property
    def cluster_key(self) -> str:
        """Shared by the processes of a cluster; empty: none. Raises VariableError."""
        return _secret("OSCINE_CLUSTER_KEY") or ""

    @property
    def traces(self) -> str | None:
        """OTLP's protocol if OTEL_* name a place for traces; None for no exporter or another than OTLP's.

        OpenTelemetry's SDK reads the rest itself.
        """
        get = os.environ.get
        endpoint, protocol = (
            get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or get(f"OTEL_EXPORTER_OTLP_{name}")
            for name in ("ENDPOINT", "PROTOCOL")
        )
        disabled = get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        if not endpoint or disabled or get("OTEL_TRACES_EXPORTER", "otlp").strip() != "otlp":
            return None
        return protocol or "http/protobuf"

    @property
    def nim(self) -> dict[str, str]:
        """NIM's variables, by name: see oscine.extensions.apis.conventions.nim_variables."""
        return {name: value.strip() for name, value in os.environ.items() if name.startswith("NIM_")}

    @property
    def cache_folder(self) -> Path:
        """The folder for files that can be made again, in XDG_CACHE_HOME or its default."""
        given = self.cache_home or ""
        return Path(given if os.path.isabs(given) else os.path.expanduser("~/.cache")) / "oscine"

    @property
    def packed_folder(self) -> Path:
        """Weights that were packed for this machine's CPU."""
        return self.cache_folder / "packed"

    @property
    def scales_folder(self) -> Path:
        """Calibrated scales of keys and values."""
        return self.cache_folder / "kv_scales"

    @property
    def state_folder(self) -> Path:
        """The folder for files that outlive a server: XDG_STATE_HOME or its default."""
        given = os.environ.get("XDG_STATE_HOME", "")
        return Path(given if os.path.isabs(given) else os.path.expanduser("~/.local/state"))

    @property
    def ollama_folders(self) -> tuple[Path, ...]:
        """Folders of Ollama's models: OLLAMA_MODELS, or the user's own and the one of Ollama's service."""
        given = os.environ.get("OLLAMA_MODELS")
        own = Path(os.path.expanduser("~/.ollama/models"))
        return (Path(given),) if given else (own, Path("/usr/share/ollama/.ollama/models"))

    @property
    def num_gpus(self) -> int:
        """The number of NVIDIA GPUs that this process may use."""
        if self.visible_gpus is not None:
            return len([gpu for gpu in self.visible_gpus.split(",") if gpu not in ("", "-1")])
        return sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))


def check_cluster_key(key: str) -> None:
    """Raises ValueError."""
    if key and len(key) < _LEAST_KEY:
        raise ValueError(f"OSCINE_CLUSTER_KEY must have {_LEAST_KEY} characters or more (openssl rand -hex 32)")
