"""What is said at start of backends that serve some steps, or none: the same arithmetic as when ops are called."""

from dataclasses import replace

import pytest
import torch

from oscine.ops import triton_range
from oscine.ops.attention import hopper as attention
from oscine.ops.choose import hopper as screened
from oscine.ops.interface import Shapes
from oscine.ops.linear import hopper as linear
from oscine.ops.platforms.table import choose, describe
from oscine.ops.qkv import hopper as qkv
from oscine.ops.qkv import triton as portable_qkv

PUBLISHED = Shapes(torch.bfloat16, page_size=64, query_heads=64, kv_heads=8, head_dim=64, hidden=2880)
# each with the ops whose fast kernel it disables
CHANGES: list[tuple[dict[str, object], set[str]]] = [
    ({}, set()),
    ({"page_size": 32}, {"attention"}),
    ({"page_size": 128}, {"attention"}),
    ({"head_dim": 32}, {"attention", "norm_qkv"}),
    ({"query_heads": 32}, {"attention"}),
    ({"hidden": 2884}, {"norm_qkv", "lm_head", "chooser"}),
    ({"hidden": 2888}, {"chooser"}),
    ({"query_heads": 3, "kv_heads": 3, "head_dim": 4}, {"attention", "norm_qkv", "out_proj"}),
    ({"dtype": torch.float16}, {"attention", "norm_qkv", "out_proj", "lm_head"}),
]


def runs_on_hopper(shapes: Shapes) -> dict[str, bool]:
    """Whether a step of these shapes, and of few tokens, runs the Hopper kernel of each op that serves some steps."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=shapes.dtype)

    heads, kv_heads, head_dim, hidden = shapes.query_heads, shapes.kv_heads, shapes.head_dim, shapes.hidden
    pages = empty(1, 2, kv_heads, shapes.page_size, head_dim)
    x, projection = empty(2, hidden), empty(8, hidden)
    columns = heads * head_dim
    return {
        "attention": attention.fits(empty(2, heads, head_dim), pages),
        "norm_qkv": qkv.choose_tile(2, projection, pages) is not None,
        "out_proj": linear.choose_tile(linear.OUT_PROJ_TILES, empty(2, columns), empty(8, columns)) is not None,
        "lm_head": linear.choose_tile(linear.LM_HEAD_TILES, x, projection) is not None,
        "chooser": screened.prepare(torch.ones(8, hidden)) is not None,
    }


@pytest.mark.parametrize(("changes", "expected"), CHANGES, ids=[str(changes) for changes, _ in CHANGES])
def test_a_configuration_that_disables_a_kernel_says_so(changes: dict[str, object], expected: set[str]) -> None:
    shapes = replace(PUBLISHED, **changes)  # type: ignore[arg-type]
    assert {op for op, runs in runs_on_hopper(shapes).items() if not runs} == expected
    choice = choose("hopper")
    first, *others = describe(choice, shapes).splitlines()
    assert {line.partition("=")[0] for line in others} == expected
    for op in runs_on_hopper(shapes):
        assert (f"{op}={choice[op]} (" in first) == (op not in expected)


def test_the_log_of_a_published_model_says_which_steps_have_which_kernels() -> None:
    said = describe(choose("hopper"), PUBLISHED)
    assert "attention=hopper (prompts with keys in bfloat16, decodes of 2-64 sequences alone; else triton), " in said
    assert describe(choose("cuda"), PUBLISHED).startswith("ops: rms_norm=triton, norm_qkv=triton, attention=triton, ")


def test_pages_of_32_tokens_lose_a_kernel() -> None:
    said = describe(choose("hopper"), replace(PUBLISHED, page_size=32))
    assert "attention=triton, " in said
    assert said.endswith("\nattention=hopper is not used: it needs page size 64, not 32")


def test_queries_that_hoppers_decode_reads_are_rotated() -> None:
    """It cannot rotate them, so steps of nothing but its decodes must not leave that to it."""
    assert attention.MAX_DECODES <= portable_qkv.MAX_ROTATED


@pytest.mark.parametrize("platform", ["blackwell", "blackwell_rtx"])
def test_experts_of_blackwell_are_not_the_default(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 activations are less exact, so they are used only if asked for."""
    monkeypatch.setattr(triton_range, "installed", lambda: "3.9.0")
    first, *others = describe(choose(platform), PUBLISHED).splitlines()
    assert "moe=triton" in first.split(", ")
    assert others == [f"moe={platform} is not used: it needs --activation-dtype fp8, not auto"]
    [only] = describe(choose(platform), replace(PUBLISHED, activation_dtype="fp8")).splitlines()
    assert f"moe={platform}" in only.split(", ")


@pytest.mark.parametrize(("changes", "version"), [({"page_size": 32}, "3.9.0"), ({}, "3.8.0")])
def test_prompts_on_blackwell_say_which_kernel_they_have(
    changes: dict[str, object], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_range, "installed", lambda: "3.9.0")
    said = describe(choose("blackwell"), PUBLISHED)
    assert "attention=blackwell (prompts with keys in bfloat16; else triton)" in said
    monkeypatch.setattr(triton_range, "installed", lambda: version)
    said = describe(choose("blackwell"), replace(PUBLISHED, **changes))  # type: ignore[arg-type]
    missing = "page size 64, not 32" if changes else "Triton 3.9 or newer on this GPU, not 3.8.0"
    assert f"\nattention=blackwell is not used: it needs {missing}\n" in said
