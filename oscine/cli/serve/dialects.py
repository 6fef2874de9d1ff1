"""Options of other servers for which `oscine serve` has no option of its own.

Each one is accepted without effect, with a note, or refused because it would change results or capacity in a way that
is not supported. Other names for Oscine's options are declared in oscine.config. Names have hyphens here; the command
line and YAML files also take underscores. A dot is a level of a YAML file.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from oscine.cli.serve.name import Name, Values, note
from oscine.option import OptionError, either

# More than one of these would be a feature that is not there yet.
_TENSOR, _PIPELINE, _EXPERT = (f"{kind} parallelism" for kind in ("tensor", "pipeline", "expert"))
MUST_BE_ONE = {
    **dict.fromkeys(("tensor-parallel-size", "tp-size", "tp"), _TENSOR),
    **dict.fromkeys(("pipeline-parallel-size", "pp-size", "pp"), _PIPELINE),
    **dict.fromkeys(("ep-size", "ep", "expert-parallel-size", "moe-expert-parallel-size"), _EXPERT),
    **dict.fromkeys(("decode-context-parallel-size", "prefill-context-parallel-size"), "context parallelism"),
    "nnodes": "a model on several machines",
    "api-server-count": "a second API process (oscine cluster has several)",
    "max-beam-width": "beam search",
}

# The values that mean what is done anyway.
MUST_BE = {
    "backend": ("pytorch",),
    "kv-cache-dtype": ("auto",),
    "kv-cache-config.dtype": ("auto",),
    "quantization": ("mxfp4", "gpt_oss_mxfp4"),
    "tokenizer-mode": ("auto", "hf"),
    "config-format": ("auto", "hf"),
    "generation-config": ("auto", "vllm"),
    "sampling-defaults": ("openai", "model"),
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
    "response-role": ("assistant",),
    "logprobs-mode": ("raw_logprobs",),
    "cpu-offload-gb": ("0",),
    "node-rank": ("0",),
}

# Letters that some of the above have.
SHORT = {
    "tensor-parallel-size": "-tp",
    "pipeline-parallel-size": "-pp",
    "dp-size": "-dp",
    "api-server-count": "-asc",
    "quantization": "-q",
    "compilation-config": "-O",
}

# Refused, because results or capacity would differ from what was asked: theirs -> what to know.
_SPECULATION = "speculative decoding is not available yet"
_LORA = "LoRA adapters are not available yet"
_TEMPLATE = "the harmony format is built in, and no template changes it"
_SAMPLING = "requests carry their own sampling parameters"
_HOST_CACHE = "a KV cache in host memory is not available yet"
_COUNTED = "a KV cache counted in tokens or pages is not available yet: see --kv-cache-bytes"
_CLUSTER = "several engines are one with `oscine cluster`: see docs/cluster.md"
_CLIENT_CERTIFICATES = "certificates of clients are not available yet: put a proxy in front"
REFUSED = {
    **dict.fromkeys(("speculative-config", "speculative-model", "speculative-algorithm"), _SPECULATION),
    **dict.fromkeys(("speculative-draft-model-path", "speculative-num-steps"), _SPECULATION),
    **dict.fromkeys(("speculative-eagle-topk", "speculative-num-draft-tokens"), _SPECULATION),
    **dict.fromkeys(("enable-lora", "lora-modules", "lora-paths"), _LORA),
    "chat-template": _TEMPLATE,
    "default-chat-template-kwargs": "requests carry their own reasoning_effort",
    **dict.fromkeys(("override-generation-config", "preferred-sampling-params"), _SAMPLING),
    **dict.fromkeys(("hf-overrides", "json-model-override-args"), "the model runs as its config.json says"),
    "hf-token": "a token on a command line can be read by others: set HF_TOKEN in the environment",
    "tool-server": "name built-in tools with --tools, and MCP servers with --mcp-servers",
    **dict.fromkeys(("kv-cache-config.max-tokens", "max-total-tokens", "num-gpu-blocks-override"), _COUNTED),
    **dict.fromkeys(("kv-cache-config.host-cache-size", "kv-offloading-size"), _HOST_CACHE),
    "enable-hierarchical-cache": _HOST_CACHE,
    **dict.fromkeys(("kv-transfer-config", "disaggregation-mode"), _CLUSTER),
    **dict.fromkeys(("headless", "data-parallel-rank", "data-parallel-address"), _CLUSTER),
    **dict.fromkeys(("ssl-ca-certs", "ssl-cert-reqs"), _CLIENT_CERTIFICATES),
    "uds": "Unix sockets are not available yet: see --host and --port",
    "middleware": "no code of others runs in the server",
    "logits-processors": "no code of others runs in the server",
    "skip-tokenizer-init": "text is always read and written here",
    "allow-auto-truncate": "a prompt is never cut: one that is too long is an error",
    "enable-force-include-usage": "a stream carries usage where stream_options.include_usage asks for it",
    "return-tokens-as-token-ids": "tokens of log-probabilities are text",
    "is-embedding": "there are no embeddings",
}

_GRAPHS = "graphs cover every batch up to --max-num-seqs, with padding"
_KERNELS = "Oscine has kernels of its own"
_HARMONY = "harmony is always parsed"
_PAGES = "see --page-size"
_ONE_GPU = "there is one GPU"
_NO_LOGGING = "prompts are never logged, and each request is one line: see --log-level"
_METRICS = "see /metrics"
_RECOMPUTED = "what is preempted is computed again"
_GRAMMARS = "llguidance enforces all formats"
_ORDER = "requests run in order of their priority, then of arrival"
_COMPILED = "no part of the model is compiled by torch"
_TEXT = "the model takes text only"
_REPORTED = "it is always reported"

# Without effect: theirs -> why. Those in VALUED take values, the others are flags, with and without "no-".
IGNORED = {
    "trust-remote-code": "no code of a model is ever run",
    "enable-mixed-sampler": "requests that sample differently always share a step",
    **dict.fromkeys(("print-iter-log", "enable-metrics", "enable-server-load-tracking"), _METRICS),
    "disable-log-stats": _METRICS,
    **dict.fromkeys(("enable-chunked-prefill", "enable-mixed-chunk"), "prompts are always computed in chunks"),
    **dict.fromkeys(("enable-attention-dp", "enable-dp-attention", "enable-expert-parallel"), _ONE_GPU),
    **dict.fromkeys(("attention-dp-config.enable-balance", "disable-custom-all-reduce"), _ONE_GPU),
    **dict.fromkeys(("enable-p2p-check", "enable-eplb"), _ONE_GPU),
    "enable-auto-tool-choice": _HARMONY,
    **dict.fromkeys(("cuda-graph-config.enable-padding", "disable-cuda-graph-padding"), _GRAPHS),
    **dict.fromkeys(("disable-log-requests", "enable-log-requests", "log-requests"), _NO_LOGGING),
    **dict.fromkeys(("disable-uvicorn-access-log", "enable-log-outputs"), _NO_LOGGING),
    **dict.fromkeys(("enable-prompt-tokens-details", "enable-cache-report"), _REPORTED),
    "enable-request-id-headers": _REPORTED,
    **dict.fromkeys(("disable-hybrid-kv-cache-manager", "disable-hybrid-swa-memory"), "sliding pages are always apart"),
    "disable-cascade-attn": _KERNELS,
    "enable-torch-compile": _COMPILED,
    "skip-server-warmup": "kernels are always ready before the server is",
    "allow-credentials": "keys travel in headers, not in cookies",
    "use-tqdm-on-load": "progress is always shown",
}
VALUED = {
    **dict.fromkeys(("moe-backend", "moe-config.backend", "moe-runner-backend", "attention-backend"), _KERNELS),
    **dict.fromkeys(("prefill-attention-backend", "decode-attention-backend", "sampling-backend"), _KERNELS),
    **dict.fromkeys(("cuda-graph-config.max-batch-size", "cuda-graph-config.batch-sizes"), _GRAPHS),
    **dict.fromkeys(("max-cudagraph-capture-size", "cudagraph-capture-sizes", "cuda-graph-sizes"), _GRAPHS),
    **dict.fromkeys(("cuda-graph-max-bs", "cuda-graph-bs", "max-seq-len-to-capture"), _GRAPHS),
    **dict.fromkeys(("attention-dp-config.batching-wait-iters", "attention-dp-config.timeout-iters"), _ONE_GPU),
    **dict.fromkeys(("distributed-executor-backend", "all2all-backend", "moe-a2a-backend"), _ONE_GPU),
    **dict.fromkeys(("dist-init-addr", "master-addr", "master-port"), _ONE_GPU),
    "num-postprocess-workers": "outputs are always processed beside the engine",
    **dict.fromkeys(("tool-call-parser", "reasoning-parser", "tool-parser-plugin"), _HARMONY),
    "chat-template-content-format": _HARMONY,
    **dict.fromkeys(("block-size", "kv-cache-config.tokens-per-block"), _PAGES),
    **dict.fromkeys(("max-log-len", "log-requests-level", "log-level-http"), _NO_LOGGING),
    "decode-log-interval": _METRICS,
    **dict.fromkeys(("swap-space", "preemption-mode"), _RECOMPUTED),
    **dict.fromkeys(("guided-decoding-backend", "structured-outputs-config", "grammar-backend"), _GRAMMARS),
    **dict.fromkeys(("scheduling-policy", "schedule-policy", "schedule-conservativeness"), _ORDER),
    "max-prefill-tokens": "see --max-num-batched-tokens",
    **dict.fromkeys(("compilation-config", "torch-compile-max-bs", "optimization-level"), _COMPILED),
    **dict.fromkeys(("limit-mm-per-prompt", "allowed-local-media-path", "mm-processor-kwargs"), _TEXT),
    **dict.fromkeys(("prefix-caching-hash-algo", "swa-full-tokens-ratio"), "the prefix cache is Oscine's own"),
    **dict.fromkeys(("allowed-methods", "allowed-headers"), "pages may send what the API knows: see --cors-origins"),
    **dict.fromkeys(("code-revision", "model-loader-extra-config"), "only safetensors are read, and no code"),
    "max-logprobs": "the largest number is 20",
}


_SEVERAL = ("cudagraph-capture-sizes", "cuda-graph-sizes", "cuda-graph-bs", "allowed-methods", "allowed-headers")
_LOAD_FORMATS = ("auto", "safetensors", "fastsafetensors", "runai_streamer")  # files are read by Oscine's own code


def _must_be(name: str, allowed: tuple[str, ...], reason: str, value: Any) -> Values:
    if str(value) not in allowed:
        raise OptionError(name, f"must be {either(allowed)}, not {value}{reason}")
    return {}


def _refused(name: str, why: str, value: Any) -> Values:
    if value is False:  # a flag in a file
        return {}
    raise OptionError(name, f"is refused: {why}")


def _ignored(name: str, why: str, value: Any) -> Values:
    return {} if value is False else note(f"{name.replace('-', '_')} has no effect: {why}")


def _load_format(value: Any) -> Values:
    """A value only if it asks for random weights."""
    _must_be("load-format", (*_LOAD_FORMATS, "dummy"), "", value)
    return {"load-format": value} if value == "dummy" else {}


def _names() -> Iterator[tuple[str, Name]]:
    for name, feature in MUST_BE_ONE.items():
        reason = f"{feature} is not available yet"
        yield name, Name(f"must be 1: {reason}", partial(_must_be, name, ("1",), f": {reason}"), metavar="N")
    for name, allowed in MUST_BE.items():
        yield name, Name(f"must be {either(allowed)}", partial(_must_be, name, allowed, ""), metavar="NAME")
    for name, why in REFUSED.items():
        yield name, Name(f"refused: {why}", partial(_refused, name, why), "*", "VALUE")
    for name in (*IGNORED, *(f"no-{name}" for name in IGNORED if "." not in name)):
        why = IGNORED[name] if name in IGNORED else IGNORED[name.removeprefix("no-")]
        yield name, Name(f"has no effect: {why}", partial(_ignored, name, why), 0)
    for name, why in VALUED.items():
        nargs = "+" if name in _SEVERAL else None
        yield name, Name(f"has no effect: {why}", partial(_ignored, name, why), nargs, "VALUE")
    loads = f"must be {', '.join(_LOAD_FORMATS)}, or dummy for random weights"
    yield "load-format", Name(loads, _load_format, metavar="NAME")


NAMES = dict(_names())
