"""All settings, as frozen dataclasses by composition, validated once; the only reader of the environment.

Knows nothing of how a setting is used. A bad value raises ValueError with the name of the command-line option.
"""

import datetime
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

NANO = "oscine-nano"  # the embedded model
_LEAST_KEY = 32  # characters of a cluster's key


def _require(condition: bool, option: str, rule: str, value: object) -> None:
    if not condition:
        raise ValueError(f"--{option} must be {rule}, not {value!r}")


def _is_origin(text: str) -> bool:
    """As browsers write it: a scheme and a host without a path, or null (of files). Anything else would match none."""
    scheme, _, host = text.partition("://")
    return text in ("*", "null") or (bool(scheme and host) and "/" not in host)


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def is_hex(text: str) -> bool:
    try:
        return bytes.fromhex(text).hex() == text.lower()
    except ValueError:
        return False


@dataclass(frozen=True)
class ModelOptions:
    model: str = NANO  # a folder, a Hugging Face name, or the embedded model
    revision: str | None = None  # of the Hugging Face name
    tokenizer: str | None = None  # a folder or Hugging Face name; None: the model's own
    download_dir: str | None = None  # where files of the hub are kept; None: huggingface_hub's own cache
    random_weights: str | None = None  # 20b | 120b | path to a config.json: random weights at true shapes
    device: str = "auto"  # cpu, cuda, cuda:1, ...; auto: cuda where there is a GPU, else cpu
    # Of activations, KV and unquantised weights; auto: bfloat16 on a GPU, float32 on a CPU.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int | None = None  # tokens; None: the model's own, as far as the KV cache holds one such sequence

    def __post_init__(self) -> None:
        alone = self.random_weights is None or self.model == NANO
        _require(alone, "random-weights", "given without MODEL", f"{self.random_weights} with {self.model}")
        known = self.dtype in ("auto", "float32", "bfloat16")
        _require(known, "dtype", "auto, float32 or bfloat16", self.dtype)
        _require(self.max_model_len is None or self.max_model_len > 1, "max-model-len", "above 1", self.max_model_len)


@dataclass(frozen=True)
class CacheOptions:
    page_size: int = 64  # tokens
    # Both page groups together; None: on a GPU what --gpu-memory-utilization leaves, on a CPU 1 GiB.
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.92  # share of a GPU's memory for weights, workspace and KV cache
    # On a GPU, instead of the above: the cache's share of what is free once weights and workspace are there.
    kv_cache_free_gpu_memory_fraction: float | None = None
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        _require(self.page_size in (16, 32, 64, 128), "page-size", "16, 32, 64 or 128", self.page_size)
        given = self.kv_cache_bytes
        _require(given is None or given > 0, "kv-cache-bytes", "positive", given)
        share = self.gpu_memory_utilization
        _require(0 < share <= 1, "gpu-memory-utilization", "above 0 and at most 1", share)
        of_free = self.kv_cache_free_gpu_memory_fraction
        valid = of_free is None or 0 < of_free <= 1
        _require(valid, "kv-cache-free-gpu-memory-fraction", "above 0 and at most 1", of_free)


@dataclass(frozen=True)
class SchedulerOptions:
    max_num_seqs: int = 64  # sequences that run at once
    max_num_batched_tokens: int = 1024  # tokens computed in a step
    max_waiting: int = 2048  # requests; one more is refused with 503
    max_queued_tokens: int = 8 << 20  # prompt tokens of all sequences that run or wait; more are refused with 503
    stream_interval: int = 1  # generated tokens per output, except the first and the last of a request
    overlap: bool = True  # schedule the next step while one runs

    def __post_init__(self) -> None:
        _require(self.max_num_seqs >= 1, "max-num-seqs", "at least 1", self.max_num_seqs)
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max-num-batched-tokens",
            f"at least --max-num-seqs ({self.max_num_seqs})",
            self.max_num_batched_tokens,
        )
        _require(self.max_waiting >= 1, "max-waiting", "at least 1", self.max_waiting)
        _require(self.max_queued_tokens >= 1, "max-queued-tokens", "at least 1", self.max_queued_tokens)
        _require(self.stream_interval >= 1, "stream-interval", "at least 1", self.stream_interval)


def check_cluster_key(key: str) -> None:
    """Raises ValueError."""
    if key and len(key) < _LEAST_KEY:
        raise ValueError(f"OSCINE_CLUSTER_KEY must have {_LEAST_KEY} characters or more (openssl rand -hex 32)")


def is_loopback(host: str) -> bool:
    """Of an address or a name, without a port."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def listens(endpoint: str) -> bool:
    """Whether a ZeroMQ endpoint that a user gives is bound; else it is connected. The rule is vLLM's."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


@dataclass(frozen=True)
class PeerOptions:
    """How an engine is one of many: who reaches it, and what it shares with others."""

    host: str | None = None  # of this machine, as others reach it; None: only the server beside it does
    # Shared by all processes of a cluster, which prove to each other that they have it (oscine.engine.wire.tcp). It is
    # never shown or logged. Empty: every process that reaches the ports of `host` is accepted.
    key: str = field(default="", repr=False)
    kv_events: bool = False  # publish what the prefix cache stores and forgets
    kv_events_topic: str = "kv-events"
    kv_events_endpoint: str | None = None  # ZeroMQ's; None: a free port of host
    kv_replay_endpoint: str | None = None  # the same; None without a host: no events are given again
    kv_events_open: bool = False  # `*` in these endpoints means all addresses of this machine; else its loopback
    kv_events_kept: int = 10_000  # messages kept for subscribers that missed some, and no more than 64 MiB of them
    # Hex; prefixes have equal addresses in engines with equal seeds. Empty: a random one, so that nobody can guess any.
    prefix_seed: str = ""
    kv_transfer: bool = False  # give pages to other engines and fetch pages from them

    def __post_init__(self) -> None:
        _require(self.kv_events_kept >= 0, "kv-events-kept", "at least 0", self.kv_events_kept)
        _require(is_hex(self.prefix_seed), "prefix-seed", "an even number of hexadecimal digits", self.prefix_seed)
        published = self.host is not None or self.kv_events_endpoint is not None
        alone = (self.kv_events and not published) or (self.kv_transfer and self.host is None)
        _require(not alone, "peer-host", "given for KV events and KV transfer", None)
        check_cluster_key(self.key)
        if self.host is not None and not self.key and not self.is_local:
            rule = "an address of this machine's loopback unless OSCINE_CLUSTER_KEY is set"
            raise ValueError(f"--peer-host must be {rule}, not {self.host}")

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can reach it."""
        return self.host is None or is_loopback(self.host)


@dataclass(frozen=True)
class EngineOptions:
    """What the engine process needs; travels to it as JSON."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    peers: PeerOptions = field(default_factory=PeerOptions)
    cuda_graphs: bool = True  # replay decode steps from CUDA graphs where the ops allow it
    executor: Literal["torch", "fake"] = "torch"  # fake: scripted tokens, to measure and test the server itself
    fake_step_s: float = 0.0  # seconds a step of the fake executor takes
    # Seconds without a step, while requests run, after which the engine process is killed and started again; 0: never.
    # A step of 1,024 tokens on the slowest CPU, or one that compiles kernels, takes a fraction of the default.
    engine_timeout_s: float = 900.0
    quiet: bool = False  # no memory plan and no progress bar

    def __post_init__(self) -> None:
        _require(self.executor in ("torch", "fake"), "executor", "torch or fake", self.executor)
        _require(self.fake_step_s >= 0, "fake-step-s", "at least 0", self.fake_step_s)
        _require(self.engine_timeout_s >= 0, "engine-timeout", "at least 0", self.engine_timeout_s)


@dataclass(frozen=True)
class ServerOptions:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    served_model_names: tuple[str, ...] = ()  # empty: the model's own name
    api_keys: tuple[str, ...] = ()  # empty: no key is asked for, unless there is a file of them
    api_keys_file: str | None = None  # YAML: a list of keys with their limits; read again on SIGHUP
    cache_salt_by_key: bool = False  # whether API keys share no cached prefixes
    ssl_certfile: str | None = None  # PEM; None: plain HTTP
    ssl_keyfile: str | None = None  # PEM; None: it is in ssl_certfile
    cors_origins: tuple[str, ...] = ()  # that browsers may call from; "*": any
    root_path: str = ""  # path below which a proxy shows the server; requests may still have it
    allowed_hosts: tuple[str, ...] = ()  # further host names of a server without keys; "*": any
    max_body_bytes: int = 4 << 20  # three times a prompt of 131,072 tokens written in JSON escapes
    max_connections: int = 4096  # open ones; for one more the oldest without a request is closed
    reasoning_field: Literal["reasoning", "reasoning_content", "both"] = "reasoning"
    final_headroom: int = 0  # tokens of a budget kept for the answer, however long the model reasons; 0: none
    seed: int | None = None  # requests without a seed draw theirs from it; None: a random one
    date: str | None = None  # YYYY-MM-DD, shown to the model as the current date; None: each day's own (UTC)
    responses_db: str | None = None  # SQLite file that keeps responses; None: they are kept in memory
    responses_max_bytes: int = 1 << 30  # of all that are kept; those used longest ago go first
    responses_max_age: float = 30 * 86400.0  # seconds
    drain_s: float = 30.0  # seconds that SIGTERM gives running requests
    keep_alive_comments: bool = True  # comments in idle streams, for proxies and clients that would give up
    playground: bool = True  # the page at /
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"
    traces: str | None = None  # protocol of OTLP in which they are exported; None: there are none

    def __post_init__(self) -> None:
        _require(0 <= self.port < 65536, "port", "between 0 and 65535", self.port)
        _require(all(self.api_keys), "api-key", "a key with characters", "")
        _require(
            self.ssl_keyfile is None or bool(self.ssl_certfile), "ssl-keyfile", "given with --ssl-certfile", "alone"
        )
        for origin in self.cors_origins:
            _require(_is_origin(origin), "cors-origins", "* or origins like https://example.org", origin)
        path = self.root_path
        _require(not path or (path[0] == "/" and path[-1] != "/"), "root-path", "a path like /llm", path)
        _require(self.max_body_bytes > 0, "max-body-bytes", "positive", self.max_body_bytes)
        _require(self.max_connections >= 1, "max-connections", "at least 1", self.max_connections)
        _require(
            self.reasoning_field in ("reasoning", "reasoning_content", "both"),
            "reasoning-field",
            "reasoning, reasoning_content or both",
            self.reasoning_field,
        )
        _require(self.final_headroom >= 0, "final-headroom", "at least 0", self.final_headroom)
        _require(self.date is None or _is_date(self.date), "date", "a date like 2025-08-05", self.date)
        _require(self.responses_db != "", "responses-db", "a path, or :memory:", self.responses_db)
        _require(self.responses_max_bytes > 0, "responses-max-bytes", "positive", self.responses_max_bytes)
        _require(self.responses_max_age > 0, "responses-max-age", "positive", self.responses_max_age)
        _require(self.drain_s >= 0, "drain-s", "at least 0", self.drain_s)
        _require(self.log_format in ("text", "json"), "log-format", "text or json", self.log_format)


@dataclass(frozen=True)
class ToolOptions:
    """Tools that the server itself answers; none unless the operator names them."""

    tools: tuple[str, ...] = ()  # python, browser
    max_tool_calls: int = 32  # of built-in tools, in one response
    tool_timeout_s: float = 60.0  # for an MCP server or a browser's backend to answer
    python_isolation: Literal["namespaces", "none"] = "namespaces"
    python_timeout_s: float = 30.0
    python_memory_bytes: int = 512 << 20  # of one process; there may be 8
    python_runs: int = 4  # at once; further ones wait
    browser_folder: str | None = None  # whose files the browser searches and opens
    browser_backend: str | None = None  # package.module:name of another backend
    mcp_servers: str | None = None  # file, YAML or JSON: label -> command or url
    allow_mcp_urls: bool = False  # whether requests may name MCP servers by URL

    def __post_init__(self) -> None:
        known = set(self.tools) <= {"python", "browser"}
        _require(known, "tools", "of python and browser, with commas", ",".join(self.tools))
        _require(self.max_tool_calls >= 1, "max-tool-calls", "at least 1", self.max_tool_calls)
        _require(self.tool_timeout_s > 0, "tool-timeout-s", "positive", self.tool_timeout_s)
        isolation = self.python_isolation
        _require(isolation in ("namespaces", "none"), "python-isolation", "namespaces or none", isolation)
        _require(self.python_timeout_s > 0, "python-timeout-s", "positive", self.python_timeout_s)
        enough = self.python_memory_bytes >= 64 << 20
        _require(enough, "python-memory-bytes", "at least 67108864 (64 MiB)", self.python_memory_bytes)
        _require(self.python_runs >= 1, "python-runs", "at least 1", self.python_runs)
        self._check_browser()

    def _check_browser(self) -> None:
        if self.browser_folder is not None and self.browser_backend is not None:
            raise ValueError("--browser-folder and --browser-backend exclude each other")
        source = self.browser_folder or self.browser_backend
        if "browser" in self.tools and source is None:
            raise ValueError("--tools browser needs --browser-folder or --browser-backend")
        if "browser" not in self.tools and source is not None:
            raise ValueError("--browser-folder and --browser-backend need --tools browser")


@dataclass(frozen=True)
class Config:
    engine: EngineOptions = field(default_factory=EngineOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    tools: ToolOptions = field(default_factory=ToolOptions)


def _traces(environ: Mapping[str, str]) -> str | None:
    """As OpenTelemetry defines its variables; no exporter but OTLP's is there, and without an endpoint none is made."""

    def of_otlp(name: str) -> str | None:
        return environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environ.get(f"OTEL_EXPORTER_OTLP_{name}")

    disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if not of_otlp("ENDPOINT") or disabled or environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() != "otlp":
        return None
    return of_otlp("PROTOCOL") or "http/protobuf"


@dataclass(frozen=True)
class Environment:
    """Every environment variable that Oscine reads."""

    base_url: str | None  # OSCINE_URL: the server that `oscine chat` asks
    api_key: str | None  # OPENAI_API_KEY: sent by `oscine chat`
    server_api_key: str | None  # OSCINE_API_KEY: one more key that `oscine serve` asks for
    cluster_key: str  # OSCINE_CLUSTER_KEY: the key that the processes of a cluster share; empty: none
    traces: str | None  # OTLP's protocol if OTEL_* name a place for traces; OpenTelemetry's SDK reads the rest itself
    state_folder: Path  # XDG_STATE_HOME, or where it is by default: what outlives a server
    no_color: bool  # NO_COLOR

    @classmethod
    def read(cls) -> "Environment":
        get = os.environ.get
        return cls(
            base_url=get("OSCINE_URL"),
            api_key=get("OPENAI_API_KEY"),
            server_api_key=get("OSCINE_API_KEY"),
            cluster_key=get("OSCINE_CLUSTER_KEY", ""),
            traces=_traces(os.environ),
            state_folder=Path(get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")),
            no_color=bool(get("NO_COLOR")),
        )
