"""All settings, as frozen dataclasses by composition.

An option is declared once, as a field: its type, default, bounds, help and names (oscine.settings.option). A bad value
raises OptionError, a ValueError that names the option of the command line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, Self, get_args

from oscine.kv_dtype import KVDtype
from oscine.settings.adapters import AdapterOptions
from oscine.settings.models import ModelsOptions
from oscine.settings.option import BYTES, TOKENS, OptionError, Options, option, options_of, require
from oscine.settings.tools import FileSearchOptions
from oscine.settings.tools import ToolOptions as ToolOptions
from oscine.settings.validators import is_date, is_hex, is_origin, load_of, origins, shapes_and_skew
from oscine.system.addresses import is_loopback
from oscine.system.environment import check_cluster_key

NANO = "oscine-nano"  # the embedded model
STREAMED_TOKENS = 8192  # of a step, by default, where such a step copies experts to the GPU
SEQS, STEP_TOKENS = 64, 1024  # the default limits where no GPU's memory decides
MAX_SEQS, MAX_STEP_TOKENS = 512, 8192  # of the limits that follow from a GPU's memory (decisions/0029)
KV_DTYPES = {"fp8": KVDtype.FP8, "fp8_e4m3": KVDtype.FP8}  # of --kv-cache-dtype, other than auto
FOUND, NO_SCALES = "auto", "none"  # values of --kv-scales that are no file
# An engine that has requests and finishes no step for this long counts as hung. The limit of a GPU covers the
# compilation of kernels, that of a CPU a step of 1,024 tokens on the slowest one.
GPU_TIMEOUT_S, CPU_TIMEOUT_S = 120.0, 900.0
CPU_CACHE_BYTES = 1 << 30  # KV cache on a CPU, of all engines or ranks together


@dataclass(frozen=True)
class ModelOptions(Options, group="model"):
    model: str = option(
        NANO,
        "folder or GGUF file with a checkpoint, gpt-oss-20b, gpt-oss-120b, owner/name, or Ollama's name:tag",
        "MODEL",
        shown="a small embedded model",
        aliases=("model-path",),
    )
    revision: str | None = option(None, "branch, tag or commit of a Hugging Face name", "REV", shown="main")
    tokenizer: str | None = option(
        None,
        "folder, or Hugging Face name, of the tokenizer.json to use",
        "FOLDER",
        shown="that of MODEL",
        aliases=("tokenizer-path",),
    )
    download_dir: str | None = option(
        None, "folder that keeps what is fetched from the Hugging Face hub", "DIR", shown="$HF_HOME/hub"
    )
    random_weights: str | None = option(
        None, "random weights in the shapes of a model or config.json; NAME:skewed: with outliers", "20b|120b|FILE"
    )
    device: str = option(
        "auto",
        "device that the model runs on: cpu, cuda, cuda:1, ...; cuda:0,1 for two engines or ranks",
        "DEVICE",
        shown="a GPU if there is one, else the CPU",
    )
    tensor_parallel_size: int = option(
        1,
        "ranks that compute the model together, on a GPU each or on parts of the CPU",
        "N",
        aliases=("tp-size", "tp"),
        at_least=1,
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "type of the activations and of the KV cache; auto is bfloat16 on a GPU, float32 on a CPU"
    )
    activation_dtype: Literal["auto", "fp8"] = option(
        "auto",
        "type of the activations that experts multiply; auto: exact; fp8 is faster, on Hopper and Blackwell GPUs",
    )
    cpu_weights: Literal["int8", "bf16", "float32"] = option(
        "int8", "type of the dense weights on a CPU; applies to the C kernels, which need a C compiler"
    )
    max_model_len: int | None = option(
        None,
        "most tokens of a prompt and its answer together",
        TOKENS,
        shown="the model's own limit, as far as the KV cache holds one such sequence",
        aliases=("max-seq-len", "context-length"),
        above=1,
    )
    experts_on_host: str | None = option(
        None,
        "number of layers whose experts are offloaded to host memory; auto: as many as do not fit the GPU",
        "auto|N",
        shown="none",
        rule=("auto, or a number of layers", lambda text: text == "auto" or text.isdecimal()),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts_on_host is not None and self.tensor_parallel_size > 1:
            rule = f"needs --tensor-parallel-size 1, not {self.tensor_parallel_size}"
            raise OptionError("experts-on-host", rule, "tensor-parallel-size")
        if self.experts_on_host is not None and self.activation_dtype != "auto":
            raise OptionError("activation-dtype", "must be auto if --experts-on-host is given", "experts-on-host")
        alone = self.random_weights is None or self.model == NANO
        require(alone, "random-weights", "given without MODEL", f"{self.random_weights} with {self.model}")
        if self.revision is not None and self.model == NANO:
            raise OptionError("revision", "is for a model on the Hugging Face hub, which MODEL names", "model")

    @property
    def random_shapes(self) -> tuple[str, bool] | None:
        """The shapes of the random weights, and whether they are skewed; None: weights are not random."""
        return None if self.random_weights is None else shapes_and_skew(self.random_weights)


@dataclass(frozen=True)
class CacheOptions(Options, group="KV cache"):
    page_size: int = option(64, "tokens in a page of the KV cache", TOKENS, choices=(16, 32, 64, 128))
    kv_cache_bytes: int | None = option(  # of both page groups
        None,
        "size of the KV cache",
        BYTES,
        shown="on a GPU the memory left by weights and workspace, on a CPU 1GiB",
        aliases=("kv-cache-memory-bytes",),
        above=0,
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = option(
        "auto",
        "type of the keys and values; auto: as activations; fp8 takes half the memory, on a GPU only",
        aliases=("kv-cache-config.dtype",),
    )
    kv_scales: str = option(
        FOUND,
        "file of FP8 scales from `oscine calibrate`; auto: the model's file, if any; none: per-token scales",
        "FILE",
    )
    gpu_memory_utilization: float | None = option(
        None,
        "share of a GPU's memory that weights, workspace and KV cache may take together",
        "SHARE",
        shown="all but a 64th; beside other processes 0.92, or all but 5 GiB of more than 62 GiB",
        aliases=("mem-fraction-static",),
        above=0,
        at_most=1,
    )
    gpu_memory_bytes: int | None = option(
        None,
        "most memory that the engine uses on each GPU, as if the GPU had no more",
        BYTES,
        shown="as much as --gpu-memory-utilization allows",
        excludes=("gpu-memory-utilization",),
        above=0,
    )
    kv_cache_free_gpu_memory_fraction: float | None = option(
        None,
        "share of the GPU memory left by weights and workspace for the KV cache; excludes the three above",
        "SHARE",
        aliases=("free-gpu-memory-fraction", "kv-cache-config.free-gpu-memory-fraction"),
        excludes=("kv-cache-bytes", "gpu-memory-utilization", "gpu-memory-bytes"),
        above=0,
        at_most=1,
    )
    prefix_caching: bool = option(
        True,
        "compute each prompt from its first token, without cached prefixes",
        name="no-prefix-caching",
        aliases=("no-enable-prefix-caching", "disable-radix-cache"),
        opposites=("enable-prefix-caching", "kv-cache-config.enable-block-reuse"),
    )
    kv_offload_bytes: int | None = option(
        None,
        "host memory for pages that the KV cache evicts, of all engines together; 0 is none",
        BYTES,
        shown="none",
        aliases=("kv-cache-config.host-cache-size",),
        at_least=0,
    )
    kv_offload_dir: str | None = option(
        None,
        "folder for offloaded KV pages, reused after a restart; needs --kv-offload-bytes",
        "FOLDER",
        shown="no files",
    )
    left_bytes: int = 0  # of each GPU, for engines that will sleep beside this one
    kv_offload_disk_bytes: int = option(
        16 << 30, "most bytes of the files in --kv-offload-dir, of all engines together", BYTES, above=0
    )

    def kv_dtype(self, activations: str) -> KVDtype:
        """`activations`: torch's name of their type."""
        return KVDtype(activations) if self.kv_cache_dtype == "auto" else KV_DTYPES[self.kv_cache_dtype]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_scales not in (FOUND, NO_SCALES) and self.kv_cache_dtype == "auto":
            raise OptionError("kv-scales", "needs --kv-cache-dtype fp8", "kv-cache-dtype")
        if self.kv_offload_dir is not None and not self.kv_offload_bytes:
            raise OptionError("kv-offload-dir", "needs --kv-offload-bytes", "kv-offload-bytes")
        if self.kv_offload_bytes and not self.prefix_caching:
            raise OptionError("kv-offload-bytes", "needs cached prefixes, so it excludes --no-prefix-caching")


@dataclass(frozen=True)
class SchedulerOptions(Options, group="scheduler"):
    max_num_seqs: int = option(
        SEQS,
        "most sequences that run at once",
        "N",
        shown=f"on a GPU as many as its memory holds, up to {MAX_SEQS}; else {SEQS}",
        aliases=("max-batch-size", "max-running-requests"),
        at_least=1,
    )
    max_num_batched_tokens: int = option(
        STEP_TOKENS,
        "most tokens that are computed in one step",
        TOKENS,
        shown=f"{STEP_TOKENS} to {MAX_STEP_TOKENS} by the GPU's memory; {STREAMED_TOKENS} with --experts-on-host; "
        f"else {STEP_TOKENS}",
        aliases=("max-num-tokens", "chunked-prefill-size"),
    )
    max_waiting: int = option(
        2048, "most requests that wait; further ones get 503", "N", aliases=("max-queued-requests",), at_least=1
    )
    max_queued_tokens: int = option(
        8 << 20, "most prompt tokens of all requests that run or wait; further requests get 503", TOKENS, at_least=1
    )
    stream_interval: int = option(  # the first and the last token of a request are not held back
        1, "generated tokens per streamed event", TOKENS, at_least=1
    )
    overlap: bool = option(
        True,
        "schedule a step only after the step before it is done",
        name="no-async-scheduling",
        aliases=("disable-overlap-scheduler", "disable-overlap-schedule"),
        opposites=("async-scheduling",),
    )
    by_memory: tuple[str, ...] = ()  # fields that nobody has set: on a GPU its memory plan chooses their values

    @classmethod
    def of(cls, values: Mapping[str, Any], **fields: Any) -> Self:
        limits = {"max-num-seqs": "max_num_seqs", "max-num-batched-tokens": "max_num_batched_tokens"}
        by_memory = tuple(field for name, field in limits.items() if name not in values)
        tokens = max(STEP_TOKENS, values.get("max-num-seqs", SEQS))  # a step has a token of every sequence
        return super().of({"max-num-batched-tokens": tokens, **values}, by_memory=by_memory, **fields)

    @property
    def most_seqs(self) -> int:
        """An upper bound of max_num_seqs, for those that cannot know what a GPU's memory plan chooses."""
        return MAX_SEQS if "max_num_seqs" in self.by_memory else self.max_num_seqs

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max-num-batched-tokens",
            f"at least --max-num-seqs ({self.max_num_seqs})",
            self.max_num_batched_tokens,
            "max-num-seqs",
        )


@dataclass(frozen=True)
class SpeculationOptions(Options, group="speculation"):
    """Drafts of the next tokens. They never change an answer; how many there are follows from measured times."""

    method: Literal["auto", "ngram", "eagle3", "none"] = option(
        "auto", "how drafts are made: ngram, which auto stands for, is prompt lookup"
    )
    max_drafts: int | None = option(None, "most drafts that a sequence verifies in a step", above=0, at_most=16)
    model: str | None = option(None, "folder of an EAGLE-3 head, or its Hugging Face name")
    lookup_min: int = option(2, "fewest tokens that prompt lookup compares", above=0, at_most=64)
    lookup_max: int = option(8, "most tokens that prompt lookup compares", above=0, at_most=64)

    @property
    def is_on(self) -> bool:
        """Whether sequences may have drafts."""
        return self.method != "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lookup_min > self.lookup_max:
            raise ValueError(f"prompt_lookup_min must be at most prompt_lookup_max ({self.lookup_max})")
        if self.model is not None and self.method != "eagle3":
            raise ValueError(f"a model goes with eagle3, not {self.method}")


SPECULATION_METHODS = get_args(SpeculationOptions.__annotations__["method"])


@dataclass(frozen=True)
class PeerOptions:
    """How an engine is one of many: which of them reach it, and what it shares."""

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
    # Hex; prefixes have equal addresses in engines with equal seeds. Empty: a random one, so that none can be guessed.
    prefix_seed: str = ""
    kv_transfer: bool = False  # give pages to other engines and fetch pages from them

    def __post_init__(self) -> None:
        require(self.kv_events_kept >= 0, "kv-events-kept", "at least 0", self.kv_events_kept)
        require(is_hex(self.prefix_seed), "prefix-seed", "an even number of hexadecimal digits", self.prefix_seed)
        published = self.host is not None or self.kv_events_endpoint is not None
        alone = (self.kv_events and not published) or (self.kv_transfer and self.host is None)
        require(not alone, "peer-host", "given for KV events and KV transfer", None)
        check_cluster_key(self.key)
        if self.host is not None and not self.key and not self.is_local:
            rule = "must be an address of this machine's loopback unless OSCINE_CLUSTER_KEY is set"
            raise OptionError("peer-host", f"{rule}, not {self.host}")

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can reach it."""
        return self.host is None or is_loopback(self.host)


@dataclass(frozen=True)
class EngineOptions(Options, group="development"):
    """What the engine process needs; travels to it as JSON."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    peers: PeerOptions = option(
        PeerOptions(),
        "whether and where events of the KV cache are published for routers, in vLLM's form",
        "JSON",
        shown="they are not",
        name="kv-events-config",
        group="server",
    )
    speculation: SpeculationOptions = option(
        SpeculationOptions("none"),
        "speculative decoding: none, ngram, eagle3, or TensorRT-LLM's or vLLM's mapping",
        "JSON",
        shown="none",
        name="speculative-config",
        group="scheduler",
    )
    adapters: AdapterOptions = field(default_factory=AdapterOptions)
    cuda_graphs: bool = option(
        True,
        "use no CUDA graphs",
        name="enforce-eager",
        group="scheduler",
        aliases=("disable-cuda-graph",),
        opposites=("no-enforce-eager",),
    )
    num_threads: int | None = option(  # for the C kernels and for OpenMP, in the engine process
        None,
        "CPU threads that compute the model, per engine",
        "N",
        shown="OMP_NUM_THREADS, or the physical cores that the process may use",
        name="threads",
        group="model",
        at_least=1,
        at_most=1024,
    )
    executor: Literal["torch", "fake"] = option(
        "torch", "backend that computes tokens; fake writes a scripted text, to measure the server itself"
    )
    fake_step_s: float = option(0.0, "seconds that a step of the fake executor takes", "SECONDS", at_least=0)
    fake_token_s: float = option(0.0, "seconds that the fake executor adds per token", "SECONDS", at_least=0)
    fake_steps: str | None = option(None, "table of step times for the fake executor", "FILE", shown="none")
    engine_timeout_s: float | None = option(
        None,
        "seconds without a step before a hung engine is started again; 0 disables this",
        "SECONDS",
        shown=f"{GPU_TIMEOUT_S:g} on a GPU, else {CPU_TIMEOUT_S:g}",
        name="engine-timeout",
        group="server",
        aliases=("watchdog-timeout",),
        at_least=0,
    )
    sleep_mode: bool = option(
        False,
        "keep a copy of the weights in host memory, so that /sleep can free the GPU and /wake_up is quick",
        name="enable-sleep-mode",
        group="server",
    )
    quiet: bool = False  # no memory plan and no progress bar

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache.kv_offload_bytes and self.model.tensor_parallel_size > 1:
            rule = f"needs --tensor-parallel-size 1, not {self.model.tensor_parallel_size}"
            raise OptionError("kv-offload-bytes", rule, "tensor-parallel-size")
        require(
            self.fake_steps is None or self.executor == "fake", "fake-steps", "used with --executor fake", self.executor
        )

    def hang_limit_s(self, *, on_gpu: bool) -> float:
        """Seconds without a finished step after which the engine counts as hung; infinite: never."""
        default_s = GPU_TIMEOUT_S if on_gpu else CPU_TIMEOUT_S
        return (default_s if self.engine_timeout_s is None else self.engine_timeout_s) or inf


@dataclass(frozen=True)
class ServerOptions(Options, group="server"):
    host: str = option("127.0.0.1", "address to listen on", "ADDRESS", rule=("an address", bool))
    port: int = option(8000, "port to listen on; 0 is any free port", "PORT", at_least=0, at_most=65535)
    port_file: str | None = option(
        None,
        "file or pipe (such as /dev/fd/3) that receives the port number once the server listens",
        "FILE",
        shown="no file",
        rule=("a path", bool),
    )
    served_model_names: tuple[str, ...] = option(
        (),
        "names by which requests may call the model; * is any name",
        "NAME",
        shown="the name of MODEL",
        nargs="+",
        name="served-model-name",
        rule=("a name with characters", bool),
    )
    api_keys: tuple[str, ...] = option(
        (),
        "key that requests must send, in addition to OSCINE_API_KEY; the option may be repeated",
        "KEY",
        shown="no key is asked for",
        name="api-key",
        rule=("a key with characters", bool),
    )
    api_keys_file: str | None = option(
        None, "YAML file of keys with names, limits and priorities; SIGHUP reads it again", "FILE"
    )
    admin_keys: tuple[str, ...] = option(
        (),
        "key that may also load, unload and delete models and put them to sleep, in addition to OSCINE_ADMIN_KEY",
        "KEY",
        shown="without any keys, clients on this machine may",
        name="admin-key",
        rule=("a key with characters", bool),
    )
    cache_salt_by_key: bool = option(False, "keep the cached prefixes of each API key apart")
    ssl_certfile: str | None = option(
        None, "PEM file with the certificate chain; with it the server speaks HTTPS", "FILE", shown="plain HTTP"
    )
    ssl_keyfile: str | None = option(
        None, "PEM file with the private key", "FILE", shown="it is in the file of the certificate"
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "origins of pages whose scripts may call the server, such as https://example.org; * allows any",
        "ORIGIN",
        shown="none",
        aliases=("allowed-origins",),
        nargs="+",
        rule=("*, origins like https://example.org, or a JSON list of them", is_origin),
        split=origins,
    )
    root_path: str = option(
        "",
        "path below which a proxy shows the server, such as /llm; the proxy may leave it in requests",
        "PATH",
        shown="none",
        rule=("a path like /llm", lambda path: not path or path[0] == "/"),
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "further host names of a server without API keys, in addition to this machine's own; * allows any",
        "NAME",
        nargs="+",
        shown="none",
    )
    max_body_bytes: int = option(  # three times a prompt of 131,072 tokens written in JSON escapes
        4 << 20, "largest body of a request; a larger one gets 413", BYTES, above=0
    )
    max_connections: int = option(
        4096,
        "most connections that are open at once; at the limit a new one replaces the oldest idle one",
        "N",
        at_least=1,
    )
    data_parallel_size: int = option(
        1,
        "engines with a copy of the model each, on a GPU each or on parts of the CPU",
        "N",
        aliases=("dp-size", "dp"),
        at_least=1,
        at_most=1024,
    )
    enable_expert_parallel: bool = option(
        False,
        "divide every expert among the engines of --data-parallel-size, which run their steps together",
        opposites=("no-enable-expert-parallel",),
    )
    gpus: str | None = option(
        None,
        "GPUs to use; their layout is the best one for --profile",
        "all|N",
        shown="all for a published model, unless another option says what to use; else 1",
        excludes=("device", "tensor-parallel-size", "data-parallel-size"),
        rule=("all, or how many", lambda text: text == "all" or (text.isdecimal() and int(text) > 0)),
    )
    expected_load: str | None = option(
        None,
        "load that the layout of several GPUs shall suit: requests at once, and prompt and answer tokens of each",
        "C:ISL:OSL",
        shown="by --profile",
        excludes=("device", "tensor-parallel-size", "data-parallel-size"),
        rule=("requests:prompt tokens:answer tokens, like 64:1024:512", lambda text: load_of(text) is not None),
    )
    reasoning_field: Literal["reasoning", "reasoning_content", "both"] = option(
        "reasoning", "field of an answer that carries the reasoning"
    )
    final_headroom: int = option(
        0,
        "tokens of a request's limit that are reserved for the answer, however long the model reasons",
        TOKENS,
        at_least=0,
    )
    seed: int | None = option(
        None, "seed from which requests without a seed draw theirs", "N", shown="a random one", aliases=("random-seed",)
    )
    date: str | None = option(
        None,
        "current date that the model is told",
        "YYYY-MM-DD",
        shown="the day's own, in UTC",
        rule=("a date like 2025-08-05", is_date),
    )
    responses_db: str | None = option(
        None,
        "SQLite file that keeps responses; :memory: keeps them in memory",
        "FILE",
        shown="$XDG_STATE_HOME/oscine/responses.db; in memory for the embedded model",
        rule=("a path, or :memory:", bool),
    )
    responses_max_bytes: int = option(
        1 << 30,
        "largest total size of stored responses; the least recently used ones are removed first",
        BYTES,
        above=0,
    )
    responses_max_age: float = option(30 * 86400.0, "seconds for which responses are kept", "SECONDS", above=0)
    files_dir: str | None = option(
        None,
        "folder that keeps uploaded files and batches; :temporary: for one that ends with the server",
        "DIR",
        shown="$XDG_STATE_HOME/oscine/files; temporary if responses are kept in memory",
        rule=("a folder, or :temporary:", bool),
    )
    max_file_bytes: int = option(200 << 20, "largest file that is uploaded; a larger one gets 413", BYTES, above=0)
    files_max_bytes: int = option(
        8 << 30, "largest total size of the files of one API key; further uploads get 413", BYTES, above=0
    )
    drain_s: float = option(
        30.0, "seconds that running requests get to finish when the server is asked to stop", "SECONDS", at_least=0
    )
    keep_alive_comments: bool = option(
        True,
        "write no comments into idle streams, for clients that take a comment for an event",
        name="no-keep-alive-comments",
    )
    playground: bool = option(True, "serve no page at /", name="no-playground")
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "least severity that is logged", aliases=("uvicorn-log-level",)
    )
    log_format: Literal["text", "json"] = option("text", "form of the log on stderr, which has one line per request")
    traces: str | None = None  # protocol of OTLP in which they are exported; None: there are none

    def __post_init__(self) -> None:
        super().__post_init__()
        with_certificate = self.ssl_keyfile is None or bool(self.ssl_certfile)
        require(with_certificate, "ssl-keyfile", "given with --ssl-certfile", None)


@dataclass(frozen=True)
class Config:
    engine: EngineOptions = field(default_factory=EngineOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    tools: ToolOptions = field(default_factory=ToolOptions)
    models: ModelsOptions = field(default_factory=ModelsOptions)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Config":
        """The configuration from values by option name. Missing options have their defaults. Raises OptionError."""
        if "experts-on-host" in values:
            values = {"max-num-batched-tokens": STREAMED_TOKENS, **values}
        model, cache, scheduler = (ModelOptions.of(values), CacheOptions.of(values), SchedulerOptions.of(values))
        adapters, models = AdapterOptions.of(values), ModelsOptions.of(values)
        require(not (adapters.enable_lora and models.on_demand), "enable-lora", "used with --model, not --models", None)
        engine = EngineOptions.of(values, model=model, cache=cache, scheduler=scheduler, adapters=adapters)
        return cls(engine, ServerOptions.of(values), ToolOptions.of(values), models)


_SECTIONS = (
    *(ModelOptions, AdapterOptions, CacheOptions, SchedulerOptions, ServerOptions, ModelsOptions, ToolOptions),
    *(FileSearchOptions, EngineOptions),
)
OPTIONS = {declared.name: declared for section in _SECTIONS for declared in options_of(section)}
