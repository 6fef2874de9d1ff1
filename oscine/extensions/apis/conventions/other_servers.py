"""Options of other servers for which `oscine serve` has no option of its own.

Each one is accepted without effect, with a note, or refused because it would change results or capacity in a way that
is not supported. Other names for Oscine's options are declared in oscine.settings.config. Names have hyphens here; the
command line and YAML files also take underscores. A dot is a level of a YAML file.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from oscine.settings.name import Name, Values, note
from oscine.settings.option import OptionError, either

# More than one of these would be a feature that is not there yet: feature -> names.
MUST_BE_ONE = {
    "pipeline parallelism": "pipeline-parallel-size pp-size pp",
    "context parallelism": "decode-context-parallel-size prefill-context-parallel-size",
    "a model on several machines": "nnodes",
    "a second API process (oscine cluster has several)": "api-server-count",
    "beam search": "max-beam-width",
}

# The values that mean what is done anyway.
MUST_BE = {
    "backend": ("pytorch",),
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
    "tp-size": ("-tp",),
    "pipeline-parallel-size": ("-pp",),
    "dp-size": ("-dp",),
    "api-server-count": ("-asc",),
    "quantization": ("-q",),
    "compilation-config": ("-O",),
}

# Refused, because results or capacity would differ from what was asked: what to know -> names.
REFUSED = {
    "say it with --speculative-config": (
        "speculative-model speculative-algorithm speculative-draft-model-path speculative-num-steps "
        "speculative-eagle-topk speculative-num-draft-tokens"
    ),
    "the harmony format is built in, and no template changes it": "chat-template",
    "requests carry their own reasoning_effort": "default-chat-template-kwargs",
    "requests carry their own sampling parameters": "override-generation-config preferred-sampling-params",
    "the model runs as its config.json says": "hf-overrides json-model-override-args",
    "a token on a command line can be read by others: set HF_TOKEN in the environment": "hf-token",
    "name built-in tools with --tools, and MCP servers with --mcp-servers": "tool-server",
    "a KV cache counted in tokens or pages is not available yet: see --kv-cache-bytes": (
        "kv-cache-config.max-tokens max-total-tokens num-gpu-blocks-override"
    ),
    "host memory for the KV cache is counted in bytes here: see --kv-offload-bytes": (
        "kv-offloading-size enable-hierarchical-cache hicache-size hicache-ratio"
    ),
    "several engines are one with `oscine cluster`: see docs/cluster.md": (
        "kv-transfer-config disaggregation-mode headless data-parallel-rank data-parallel-address"
    ),
    "certificates of clients are not available yet: put a proxy in front": "ssl-ca-certs ssl-cert-reqs",
    "Unix sockets are not available yet: see --host and --port": "uds",
    "no code of others runs in the server": "middleware logits-processors",
    "text is always read and written here": "skip-tokenizer-init",
    "a prompt is never cut: one that is too long is an error": "allow-auto-truncate",
    "a stream carries usage where stream_options.include_usage asks for it": "enable-force-include-usage",
    "tokens of log-probabilities are text": "return-tokens-as-token-ids",
    "there are no embeddings": "is-embedding",
}

# Without effect: why -> names. Those with "=" take a value, those with "=+" one or more; the others are flags.
IGNORED = {
    "no code of a model is ever run": "trust-remote-code",
    "requests that sample differently always share a step": "enable-mixed-sampler",
    "see /metrics": (
        "print-iter-log enable-metrics enable-server-load-tracking disable-log-stats decode-log-interval="
    ),
    "prompts are always computed in chunks": "enable-chunked-prefill enable-mixed-chunk",
    "requests are placed by cached prefix and load": (
        "attention-dp-config.enable-balance attention-dp-config.batching-wait-iters= attention-dp-config.timeout-iters="
    ),
    "ranks are processes of this machine, with messages of their own": (
        "disable-custom-all-reduce enable-p2p-check distributed-executor-backend= all2all-backend= moe-a2a-backend= "
        "dist-init-addr= master-addr= master-port="
    ),
    "every rank has a part of each expert": "enable-eplb",
    "harmony is always parsed": (
        "enable-auto-tool-choice tool-call-parser= reasoning-parser= tool-parser-plugin= chat-template-content-format="
    ),
    "graphs cover every batch up to --max-num-seqs, with padding": (
        "cuda-graph-config.enable-padding disable-cuda-graph-padding cuda-graph-config.max-batch-size= "
        "cuda-graph-config.batch-sizes= max-cudagraph-capture-size= cudagraph-capture-sizes=+ cuda-graph-sizes=+ "
        "cuda-graph-max-bs= cuda-graph-bs=+ max-seq-len-to-capture="
    ),
    "prompts are never logged, and each request is one line: see --log-level": (
        "disable-log-requests enable-log-requests log-requests disable-uvicorn-access-log enable-log-outputs "
        "max-log-len= log-requests-level= log-level-http="
    ),
    "it is always reported": "enable-prompt-tokens-details enable-cache-report enable-request-id-headers",
    "sliding pages are always apart": "disable-hybrid-kv-cache-manager disable-hybrid-swa-memory",
    "Oscine has kernels of its own": (
        "disable-cascade-attn moe-backend= moe-config.backend= moe-runner-backend= attention-backend= "
        "prefill-attention-backend= decode-attention-backend= sampling-backend="
    ),
    "no part of the model is compiled by torch": (
        "enable-torch-compile compilation-config= torch-compile-max-bs= optimization-level="
    ),
    "kernels are always ready before the server is": "skip-server-warmup",
    "keys travel in headers, not in cookies": "allow-credentials",
    "progress is always shown": "use-tqdm-on-load",
    "outputs are always processed beside the engine": "num-postprocess-workers=",
    "see --page-size": "block-size= kv-cache-config.tokens-per-block=",
    "what is preempted is computed again": "swap-space= preemption-mode=",
    "llguidance enforces all formats": "guided-decoding-backend= structured-outputs-config= grammar-backend=",
    "requests run in order of their priority, then of arrival": (
        "scheduling-policy= schedule-policy= schedule-conservativeness="
    ),
    "see --max-num-batched-tokens": "max-prefill-tokens=",
    "the model takes text only": "limit-mm-per-prompt= allowed-local-media-path= mm-processor-kwargs=",
    "the prefix cache is Oscine's own": "prefix-caching-hash-algo= swa-full-tokens-ratio=",
    "pages may send what the API knows: see --cors-origins": "allowed-methods=+ allowed-headers=+",
    "only safetensors are read, and no code": "code-revision= model-loader-extra-config=",
    "the largest number is 20": "max-logprobs=",
    "adapters have the type of the activations, and are divided as their matrices are": (
        "lora-dtype= fully-sharded-loras lora-backend= lora-extra-vocab-size="
    ),
}
_EXPERT_RANKS = ("ep-size", "ep", "expert-parallel-size", "moe-expert-parallel-size")
_ATTENTION_DP = ("enable-attention-dp", "enable-dp-attention")  # of TensorRT-LLM, of SGLang
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


def _attention_dp(meaning: bool, value: Any) -> Values:
    return {_ATTENTION_DP[0]: value is meaning}


def _expert_ranks(name: str, value: Any) -> Values:
    """1, or how many of the ranks divide the experts there."""
    if str(value) == "1":
        return {}
    return _ignored(name, "every rank has a part of each expert", value)


def _load_format(value: Any) -> Values:
    """A value only if it asks for random weights."""
    _must_be("load-format", (*_LOAD_FORMATS, "dummy"), "", value)
    return {"load-format": value} if value == "dummy" else {}


def _by_name(table: dict[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, about) for about, names in table.items() for name in names.split())


def _names() -> Iterator[tuple[str, Name]]:
    for name, feature in _by_name(MUST_BE_ONE):
        reason = f"{feature} is not available yet"
        yield name, Name(f"must be 1: {reason}", partial(_must_be, name, ("1",), f": {reason}"), metavar="N")
    for name, allowed in MUST_BE.items():
        yield name, Name(f"must be {either(allowed)}", partial(_must_be, name, allowed, ""), metavar="NAME")
    for name, why in _by_name(REFUSED):
        yield name, Name(f"refused: {why}", partial(_refused, name, why), "*", "VALUE")
    for spelled, why in _by_name(IGNORED):
        name, valued, several = spelled.partition("=")
        for given in (name,) if valued or "." in name else (name, f"no-{name}"):
            ignored = partial(_ignored, given, why)
            yield given, Name(f"has no effect: {why}", ignored, (several or None) if valued else 0, "VALUE")
    for name in _EXPERT_RANKS:
        yield name, Name("every rank has a part of each expert", partial(_expert_ranks, name), metavar="N")
    for name in _ATTENTION_DP:
        for given, meaning in ((name, True), (f"no-{name}", False)):
            told = partial(_attention_dp, meaning)
            yield given, Name("each rank is an engine; see --enable-expert-parallel", told, 0)
    loads = f"must be {', '.join(_LOAD_FORMATS)}, or dummy for random weights"
    yield "load-format", Name(loads, _load_format, metavar="NAME")


NAMES = dict(_names())
