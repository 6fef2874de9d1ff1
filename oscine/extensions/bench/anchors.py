"""Published figures of other systems with gpt-oss, each with its source, to compare with ours."""

from dataclasses import dataclass

from oscine.extensions.bench.result import Point

VLLM = "vLLM 0.26"
TENSORRT_LLM = "TensorRT-LLM"

SAME_MACHINE = "measured on one H200 with the workload of `oscine bench engine`; best MoE backend, second pass"


@dataclass(frozen=True, slots=True)
class Anchor:
    """One peer at one point of load; None where the peer has no figure."""

    system: str
    model: str  # 120b | 20b
    gpu: str
    concurrency: int | None
    isl: int  # prompt tokens
    osl: int  # generated tokens
    output_tok_s: float | None  # per GPU
    tok_s_user: float | None
    source: str
    decode_step_ms: float | None = None


def _vllm(
    model: str, concurrency: int, isl: int, osl: int, output_tok_s: float, step_ms: float, tok_s_user: float
) -> Anchor:
    return Anchor(
        VLLM, model, "H200", concurrency, isl, osl, output_tok_s, tok_s_user, SAME_MACHINE, decode_step_ms=step_ms
    )


_GUIDE = "published: TensorRT-LLM performance overview, offline, one GPU"

ANCHORS = (
    _vllm("120b", 1, 1024, 256, 226, 4.18, 239),
    _vllm("120b", 8, 1024, 256, 845, 5.33, 188),
    _vllm("120b", 64, 1024, 256, 1805, 24.7, 40),
    _vllm("120b", 256, 1024, 1024, 6180, 35.7, 28),
    _vllm("120b", 512, 1024, 512, 7153, 48.9, 20.4),
    _vllm("120b", 1024, 1024, 1024, 8943, 89.7, 11.1),
    _vllm("20b", 1, 1024, 256, 330, 2.96, 337),
    _vllm("20b", 8, 1024, 256, 1497, 4.95, 202),
    _vllm("20b", 64, 1024, 256, 6089, 7.21, 139),
    _vllm("20b", 256, 1024, 512, 12152, 14.5, 69),
    _vllm("20b", 1024, 1024, 1024, 19719, 38.7, 25.8),
    Anchor(TENSORRT_LLM, "120b", "H200", None, 1000, 1000, 6868, None, _GUIDE),
    Anchor(TENSORRT_LLM, "20b", "H200", None, 1000, 1000, 13858, None, _GUIDE),
    Anchor("vLLM 0.18", "120b", "H200", 4, 1024, 1024, 4 * 158, 158, "published, TP1"),
    Anchor("vLLM 0.18", "120b", "2x H200", 64, 1024, 1024, 2192, 69, "published, TP2, tok/s a GPU"),
    Anchor("vLLM 0.18", "120b", "4x H200", 64, 1024, 1024, 1667, 106, "published, TP4, tok/s a GPU"),
    Anchor("vLLM 0.18", "120b", "8x H200", 64, 1024, 1024, 1122, 142, "published, TP8, tok/s a GPU"),
    Anchor("MLPerf v6.0", "120b", "8x H200", None, 0, 0, 3585, None, "published: offline, 28,680 on 8 GPUs"),
    Anchor("NVIDIA's headline", "120b", "GB200 NVL72", None, 0, 0, 20833, 30, "published: 1.5 M tok/s a rack of 72"),
)

# Prompt tokens per second of vLLM, 1024-token prompts, by (model, whether requests are many).
_VLLM_PREFILL = {("120b", True): 45000.0, ("120b", False): 19000.0, ("20b", True): 77000.0, ("20b", False): 50000.0}


def vllm(model: str, point: Point) -> Anchor:
    """vLLM's figures for exactly this load."""
    load = VLLM, model, point
    found = (a for a in ANCHORS if a.concurrency and (a.system, a.model, Point(a.concurrency, a.isl, a.osl)) == load)
    return next(found, Anchor(VLLM, model, "H200", point.concurrency, point.isl, point.osl, None, None, SAME_MACHINE))


def vllm_prefill(model: str, point: Point) -> float | None:
    """Prompt tokens per second; known for one prompt and for a large batch."""
    if point.isl != 1024 or 1 < point.concurrency < 64:
        return None
    return _VLLM_PREFILL.get((model, point.concurrency > 1))
