"""Predicts the time of ops from bytes, tiles and products: `python -m benchmarks.kernels.expected`.

First the prediction beside every time that was measured on Hopper, then the experts of one layer of gpt-oss-120b on
Blackwell, which nobody has run here, beside published times, and the attention of prompts. No GPU is used.

    seconds = (memory^4 + products^4)^(1/4) + launches
    memory    = bytes / bandwidth
    products  = (instructions of the expansion per entry + cycles of the tensor core per column) * units / clock
    launches  = 4 us for each kernel of the experts, 1.6 us for each other one

An entry is the rows of one expert that share a tile; columns are what a tile multiplies, empty ones included. Both are
counted with the plan of the kernels (oscine.ops.moe.hopper.plan) for random routings. A unit is 64 x 64 weights.

    attention of prompts = (pairs of a query and a key * cycles / clock + tiles * 1.5 us) / processors + launch

Pairs are those of all blocks that the kernel visits, masked ones included.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from oscine.extensions.bench.roofline import expert_bytes
from oscine.model.config import gpt_oss_120b
from oscine.ops.attention import blackwell_prefill, hopper_prefill
from oscine.ops.moe import blackwell, hopper
from oscine.ops.moe.hopper import Tiling

Routing = Literal["uniform", "power law"]

CONFIG = gpt_oss_120b()
HIDDEN, INTERMEDIATE = CONFIG.hidden_size, CONFIG.intermediate_size
EXPERTS, PER_TOKEN = CONFIG.experts[0], CONFIG.num_experts_per_tok
WINDOW = min(window for window in CONFIG.windows if window)
PAGE = 64  # tokens
DRAWS = 8  # routings, whose mean is taken
SHARPNESS = 4  # of the maximum of memory and products
LAUNCH_S = 1.6e-6  # of a kernel that starts while the one before it ends
EXPERTS_LAUNCH_S = 4e-6  # of one that also waits for tokens, fills its stages and ends unevenly
SPLIT_S = 4e-6  # combination of the splits of few long contexts
ISSUE = 1.1  # cycles per instruction of the expansion
INSTRUCTIONS = {0: 77, 1: 34, 2: 56}  # per unit and warp, by the planes of FP8; 0: fp16 (decisions 12, 31)
PAIR_CYCLES = 0.13  # per pair, of a processor: exponentials (1 / 16) and products (1 / 16) hardly overlap
TILE_S = 1.5e-6  # of a tile of attention: to find it, its queries, its first block and its results
FP16_CYCLES, FP8_CYCLES = 2.2, 1.5  # of a column of a unit; nominal: 2 and 1


@dataclass(frozen=True, slots=True)
class Chip:
    name: str
    bytes_per_s: float
    clock: float  # Hz, as in the measurement
    sms: int
    flops_per_s: float = 0.0  # bfloat16, of a large matrix product, measured


H200 = Chip("H200", 4.4e12, 1.90e9, 132, 7.6e14)  # docs/hardware.md; short runs, at a full clock
H100 = Chip("H100", 3.02e12, 1.70e9, 132, 7.93e14)  # `oscine bench ops`, near the power limit


@dataclass(frozen=True, slots=True)
class Work:
    """What the experts of a layer do for one step, in the mean of DRAWS routings."""

    experts: float  # different ones
    entries: float
    columns: float


def counts(tokens: int, experts: int, routing: Routing, source: random.Random) -> list[int]:
    """Rows of each expert that has some.

    A power law: as the published times of Blackwell were measured. Loads are drawn with a density of 1 / load, scaled
    to the number of pairs and rounded; what is missing or too much is given to or taken from the largest ones.
    """
    if routing == "uniform":
        found = [0] * experts
        for _ in range(tokens):
            for expert in source.sample(range(experts), PER_TOKEN):
                found[expert] += 1
        return [count for count in found if count]
    pairs = tokens * PER_TOKEN
    low, high = (1.0, 0.8 * tokens) if pairs > experts else (0.01, 2.0)
    loads = [low * (high / low) ** source.random() for _ in range(experts)]
    found = sorted((round(load * pairs / sum(loads)) for load in loads), reverse=True)
    missing = pairs - sum(found)
    for i in range(abs(missing)):
        found[i % experts] += 1 if missing > 0 else -1
    return [count for count in found if count > 0]


@cache
def work(tokens: int, tiling: Tiling, routing: Routing = "uniform") -> Work:
    source = random.Random(tokens)
    drawn = [counts(tokens, EXPERTS, routing, source) for _ in range(DRAWS)]
    entries = [rows for each in drawn for count in each for rows in _entries(count, tiling.tokens)]
    columns = sum(hopper_columns(rows, tiling) for rows in entries)
    return Work(sum(map(len, drawn)) / DRAWS, len(entries) / DRAWS, columns / DRAWS)


def _entries(count: int, most: int) -> Iterator[int]:
    yield from [most] * (count // most)
    if count % most:
        yield count % most


def hopper_columns(rows: int, tiling: Tiling) -> int:
    """That a tile of so many rows multiplies."""
    columns = tiling.tokens
    if tiling.halves and tiling.tokens >= 128 and rows <= tiling.tokens // 4:
        columns = tiling.tokens // 4
    elif tiling.halves and rows <= tiling.tokens // 2:
        columns = tiling.tokens // 2
    elif rows <= tiling.middle:
        columns = tiling.middle
    return columns * max(1, tiling.planes)


def least(chip: Chip, num_bytes: float, product_s: float) -> float:
    """Seconds of reads and products that overlap."""
    memory_s = num_bytes / chip.bytes_per_s
    return float((memory_s**SHARPNESS + product_s**SHARPNESS) ** (1 / SHARPNESS))


def hopper_experts(chip: Chip, tokens: int, *, fp8: bool = False, experts: float | None = None) -> float:
    """Seconds of one layer's experts. experts: different ones, where a measurement says how many it had."""
    plan = hopper.plan_fp8 if fp8 else hopper.plan
    tiling = plan(tokens, PER_TOKEN, EXPERTS, INTERMEDIATE)
    needed = work(tokens, tiling)
    if experts is not None:
        share = experts / needed.experts
        needed = replace(needed, experts=experts, entries=needed.entries * share, columns=needed.columns * share)
    units = 3 * (HIDDEN // 64) * (INTERMEDIATE // 64) / chip.sms
    column = FP8_CYCLES if tiling.planes else FP16_CYCLES
    cycles = units * (needed.entries * INSTRUCTIONS[tiling.planes] * ISSUE + needed.columns * column)
    seconds = least(chip, needed.experts * expert_bytes(CONFIG), cycles / chip.clock)
    return seconds + 2 * EXPERTS_LAUNCH_S + _sort_s(chip, tokens)


def _sort_s(chip: Chip, tokens: int) -> float:
    """A row is read, and written for each of its experts. Few tokens are not sorted."""
    return 0.0 if tokens <= 4 else LAUNCH_S + 2 * HIDDEN * tokens * (1 + PER_TOKEN) / chip.bytes_per_s


def decode_attention(chip: Chip, sequences: int, keys: int, *, is_split: bool) -> float:
    """Seconds of one layer, one token of each sequence; bfloat16."""
    key_bytes = 2 * 2 * CONFIG.num_key_value_heads * CONFIG.head_dim
    row_bytes = 2 * 2 * CONFIG.num_attention_heads * CONFIG.head_dim  # q and the result
    return LAUNCH_S + least(chip, sequences * (keys * key_bytes + row_bytes), SPLIT_S if is_split else 0.0)


def prompt_attention(
    chip: Chip,
    tokens: int,
    context: int = 0,
    *,
    prompts: int = 1,
    window: int = 0,
    tile: int = hopper_prefill.TOKENS.value * hopper_prefill.CONSUMERS.value,
    block: int = 128,
    pair_cycles: float = PAIR_CYCLES,
) -> float:
    """Seconds of one layer, `tokens` in all. context: of each prompt, with its tokens; 0: no more than these."""
    each = tokens // prompts
    context = context or each
    pairs = 0
    starts = range(context - each, context, tile)
    for query in starts:
        first = max(query - window + 1, 0) // PAGE * PAGE if window else 0
        pairs += tile * block * -(-(min(query + tile, context) - first) // block)
    cycles = prompts * pairs * CONFIG.num_attention_heads * pair_cycles
    tiles = prompts * len(starts) * CONFIG.num_key_value_heads
    return LAUNCH_S + (cycles / chip.clock + tiles * TILE_S) / chip.sms


def projection(
    chip: Chip, tokens: int, rows: int, columns: int, *, launches: int, share: float = 1.0, passes: float = 0.0
) -> float:
    """Seconds of a product with [rows, columns] weights in bfloat16, or a share of their bytes.

    passes: bytes per token that other kernels of the op read and write.
    """
    product_s = 2 * tokens * rows * columns / chip.flops_per_s
    memory = 2 * rows * columns * share + 2 * tokens * (rows + columns)
    return least(chip, memory, product_s) + tokens * passes / chip.bytes_per_s + launches * LAUNCH_S


def norm_qkv(chip: Chip, tokens: int) -> float:
    """Up to 32 tokens weights are in 12 bits, and the rotation is in the same kernel."""
    rows = (CONFIG.num_attention_heads + 2 * CONFIG.num_key_value_heads) * CONFIG.head_dim
    if tokens <= 32:
        return projection(chip, tokens, rows, HIDDEN, launches=2, share=0.75)
    norm = 2 * HIDDEN * (1 + PER_TOKEN + 2)  # the stream, the sums of the experts; both results
    return projection(chip, tokens, rows, HIDDEN, launches=3, passes=norm + 2 * 2 * rows)


def head_and_sample(chip: Chip, tokens: int) -> float:
    """Logits in float32 are written once and read once."""
    return projection(chip, tokens, CONFIG.vocab_size, HIDDEN, launches=2, passes=4 * 2 * CONFIG.vocab_size)


@dataclass(frozen=True, slots=True)
class Measured:
    op: str
    chip: Chip
    tokens: int
    us: float
    predicted_s: Callable[[Chip, int], float]
    source: str

    @property
    def error(self) -> float:
        """Of the prediction, relative to the measured time."""
        return self.predicted_s(self.chip, self.tokens) * 1e6 / self.us - 1


def _fp8(chip: Chip, tokens: int) -> float:
    return hopper_experts(chip, tokens, fp8=True)


def _of_draw(chip: Chip, tokens: int) -> float:
    """By the share of the ceiling in the table of ops, the draw had 26 and 113 different experts."""
    return hopper_experts(chip, tokens, experts={8: 26, 64: 113}.get(tokens))


def _full(chip: Chip, sequences: int) -> float:
    return decode_attention(chip, sequences, 1024, is_split=sequences < 64)


def _window(chip: Chip, sequences: int) -> float:
    return decode_attention(chip, sequences, WINDOW, is_split=False)


def _prompt(chip: Chip, tokens: int) -> float:
    return prompt_attention(chip, tokens)


def _continued(chip: Chip, tokens: int) -> float:
    return prompt_attention(chip, tokens, 32_768)


def _prompts(chip: Chip, tokens: int) -> float:
    return prompt_attention(chip, tokens, prompts=8)


def _window_prompts(chip: Chip, tokens: int) -> float:
    return prompt_attention(chip, tokens, prompts=8, window=WINDOW, block=PAGE)


_PROMPTS = "log, Prompts: attention in Gluon"
_OPS = "`oscine bench ops` on one H100, context 1,024"
_SERIES: tuple[tuple[str, Chip, Callable[[Chip, int], float], str, dict[int, float]], ...] = (
    ("experts", H200, hopper_experts, "decision 31; log, Tiles of three quarters", {
        1: 22, 8: 95, 64: 338, 512: 510, 1024: 610, 2048: 857, 8192: 2465}),
    ("experts, FP8", H200, _fp8, "decision 31", {1: 19.5, 8: 91, 512: 418, 1024: 477, 8192: 1586}),
    ("experts", H100, _of_draw, _OPS, {1: 24.4, 8: 122, 64: 498, 256: 585, 1024: 736, 8192: 2786}),
    ("attention, full", H100, _full, _OPS, {1: 5.95, 8: 8.5, 64: 46.6, 256: 184, 1024: 715}),
    ("attention, window", H100, _window, _OPS, {64: 6.7, 256: 29, 1024: 101}),
    ("norm_qkv", H100, norm_qkv, _OPS, {1: 10.2, 8: 11.9, 64: 17.2, 256: 25.7, 1024: 67.4, 8192: 490}),
    ("prompt", H200, _prompt, _PROMPTS, {1024: 28.6, 8192: 1110}),
    ("prompt, 32 k", H200, _continued, _PROMPTS, {8192: 7663}),
    ("eight prompts", H200, _prompts, _PROMPTS, {8192: 191.2}),
    ("eight, window", H200, _window_prompts, _PROMPTS, {8192: 91.8}),
    ("head and sample", H100, head_and_sample, _OPS, {1: 384, 64: 442, 256: 617, 1024: 2157}),
)  # fmt: skip
MEASURED = tuple(
    Measured(op, chip, tokens, us, predicted_s, source)
    for op, chip, predicted_s, source, series in _SERIES
    for tokens, us in series.items()
)
# Not predicted: the router (4 to 100 us), the screened head, projections that cuBLAS cuts badly
# (out_proj of 256 tokens).


def measured_table(rows: Sequence[Measured] = MEASURED) -> Iterator[str]:
    yield f"{'op':<18} {'chip':<5} {'tokens':>6} {'measured us':>11} {'predicted':>9} {'error':>7}  source"
    for row in rows:
        predicted = row.predicted_s(row.chip, row.tokens) * 1e6
        yield (
            f"{row.op:<18} {row.chip.name:<5} {row.tokens:>6} {row.us:>11.1f} {predicted:>9.1f} {row.error:>+7.1%}  "
            + row.source
        )
    worst = max(rows, key=lambda row: abs(row.error))
    yield f"largest error: {worst.error:+.1%} ({worst.op}, {worst.chip.name}, {worst.tokens} tokens)"


@dataclass(frozen=True, slots=True)
class Published:
    """Times of one layer of gpt-oss-120b's experts by tokens, us; MXFP4 weights, MXFP8 activations, power law."""

    chip: str
    system: str
    us: dict[int, float]


SOURCE = "tables of AISimulate 0.13, Apache-2.0: TensorRT-LLM 1.3.0rc20, w4a8_mxfp4_mxfp8, power_law_1.01"
PUBLISHED = (
    Published("B200", "TensorRT-LLM", {1: 23, 8: 81, 32: 153, 128: 251, 512: 306, 8192: 1045}),
    Published("GB300", "TensorRT-LLM", {1: 23.2, 8: 81, 32: 148, 128: 243, 512: 298, 8192: 859}),
)
# Memory at the share of its nominal 8 TB/s that a copy reaches on an H200 (4.28 of 4.8 TB/s); nominal clocks
B200 = Chip("B200", 8e12 * 4.28 / 4.8, 1.85e9, 148)
GB300 = Chip("GB300", 8e12 * 4.28 / 4.8, 1.92e9, 160)
REACHED = 6.25e12  # bytes/s: the most that published times of experts on these chips imply (balanced, 128 tokens)
BLOCK = 128  # weight rows, and values along k, of a unit
OPERAND_CYCLES = BLOCK * BLOCK / 128  # the weights of a unit, a byte each, are read from shared memory
TENSOR_CYCLES = 2 * FP8_CYCLES  # of a column of a unit; nominal: 2


def blackwell_experts(chip: Chip, tokens: int, routing: Routing) -> float:
    """Seconds of one layer's experts, MXFP4 weights times MXFP8 tokens. No instruction expands weights."""
    tiling = blackwell.plan(tokens, PER_TOKEN, EXPERTS)
    needed = work(tokens, Tiling(tiling.tokens), routing)
    row_tiles = -(-2 * INTERMEDIATE // BLOCK) - (-HIDDEN // BLOCK)
    units = row_tiles * -(-HIDDEN // BLOCK) / chip.sms
    cycles = units * max(needed.entries * OPERAND_CYCLES, needed.columns * TENSOR_CYCLES)
    seconds = least(chip, needed.experts * expert_bytes(CONFIG), cycles / chip.clock)
    return seconds + 2 * EXPERTS_LAUNCH_S + _sort_s(chip, tokens)


EXP_CYCLES = {"B200": 1 / 16, "GB300": 1 / 32}  # of the exponential of a pair, of an SM; nominal
# Of a pair's products, for blocks of 128 rows and 64 keys: scores, whose operands are 24 KiB in shared memory, at 128
# bytes per cycle; then values, 128 x 64 x 64 at 4,096 multiply-adds per cycle
SCORE_CYCLES, VALUE_CYCLES = 24 * 1024 / 128 / (128 * 64), 128 * 64 * 64 / 4096 / (128 * 64)
INSTRUCTION_CYCLES = 305 / (128 * 64)  # instructions of each of four warps in a block without a mask, issued in turns
PROMPTS = (  # tokens, context of each prompt or 0, prompts, window
    *((1024, 0, 1, 0), (8192, 0, 1, 0), (8192, 32_768, 1, 0), (8192, 0, 8, 0), (8192, 0, 8, WINDOW)),
)


def blackwell_prompts(
    chip: Chip, tokens: int, context: int = 0, prompts: int = 1, window: int = 0, *, overlap: bool
) -> float:
    """Seconds of one layer's attention. overlap: exponentials, products and other instructions, else none of them."""
    parts = EXP_CYCLES[chip.name], SCORE_CYCLES + VALUE_CYCLES, INSTRUCTION_CYCLES
    return prompt_attention(
        chip,
        tokens,
        context,
        prompts=prompts,
        window=window,
        tile=blackwell_prefill.TOKENS.value * blackwell_prefill.GROUPS.value,
        block=PAGE,
        pair_cycles=max(parts) if overlap else sum(parts),
    )


def prompts_table(chips: Sequence[Chip] = (B200, GB300)) -> Iterator[str]:
    yield f"{'chip':<6} {'tokens':>6} {'context':>7} {'prompts':>7} {'window':>6} {'us, all overlaps':>16} nothing"
    for chip in chips:
        for tokens, context, prompts, window in PROMPTS:
            best, worst = (
                1e6 * blackwell_prompts(chip, tokens, context, prompts, window, overlap=overlap)
                for overlap in (True, False)
            )
            length = context or tokens // prompts
            yield f"{chip.name:<6} {tokens:>6} {length:>7} {prompts:>7} {window:>6} {best:>16.1f} {worst:>7.1f}"


def blackwell_table(chips: Sequence[Chip] = (B200, GB300)) -> Iterator[str]:
    yield (
        f"{'chip':<6} {'tokens':>6} {'published us':>12} {'power law':>9} {'ratio':>6} {'uniform':>8} "
        f"{'at 6.25 TB/s, power law':>23} {'ratio':>6}"
    )
    for chip, published in zip(chips, PUBLISHED, strict=True):
        for tokens, us in published.us.items():
            skewed, uniform = (1e6 * blackwell_experts(chip, tokens, kind) for kind in ("power law", "uniform"))
            slower = 1e6 * blackwell_experts(replace(chip, bytes_per_s=REACHED), tokens, "power law")
            yield (
                f"{chip.name:<6} {tokens:>6} {us:>12.1f} {skewed:>9.1f} {skewed / us:>6.2f} {uniform:>8.1f} "
                f"{slower:>23.1f} {slower / us:>6.2f}"
            )


def main() -> None:
    print(*measured_table(), sep="\n")
    print(f"\nexperts of one layer of gpt-oss-120b on Blackwell, predicted; published: {SOURCE}")
    print(*blackwell_table(), sep="\n")
    print("\nattention of prompts of one layer on Blackwell, predicted")
    print(*prompts_table(), sep="\n")


if __name__ == "__main__":
    main()
