"""The attention of prompts for compute capability 10.x: interpreted on a CPU, and compiled ahead.

No such GPU has run it. The interpreter knows tensor memory, products and their order, not the hardware.
"""

import dataclasses
import re
from functools import partial

import pytest
import torch
import triton
from torch import Tensor

from oscine.ops.attention import blackwell, blackwell_prefill, reference
from oscine.ops.attention import triton as portable
from oscine.ops.target import Target
from tests.ops.bound import bound
from tests.ops.cases import AttentionCase
from tests.ops.compile_ahead import Compiled, assemble_for, box_type, compile_ahead
from tests.ops.gluon_interpreter import run_gluon
from tests.ops.test_attention_gpu import (
    FILLED_CASES,
    all_as_chunks,
    counted,
    in_plain_torch,
    rms,
    rotated_later,
    run,
    truth,
)

CPU = torch.device("cpu")
SEQUENCES = (
    ((1, 70), (9, 130), (40, 40)),  # one token; the second group has none; some of both
    ((77, 300), (150, 150), (1, 129), (3, 64)),  # several tiles; contexts of whole pages, and of one token more
    ((2, 64),),  # the first must not see the last key of its page
    ((30, 800),),  # more pages than stages
)


def prefill_nan(target: Target, out_TQD: Tensor, inputs: portable.Inputs) -> None:
    """With any release of Triton."""
    out_TQD.fill_(torch.nan)
    blackwell.launch_prefill(target, out_TQD, inputs)


ATTENTION = bound(partial(portable.attention, prefill=prefill_nan))


def interpret_prompts() -> None:
    """The error is that of rounding the results, and hardly more."""
    for sequences in SEQUENCES:
        for window in (None, 128):
            case = AttentionCase("", sequences, num_query_heads=16, num_kv_heads=2, window=window)
            left, rotated = rotated_later(all_as_chunks(case, CPU, torch.bfloat16))
            expected = truth(rotated, case)
            rounding = rms(expected.bfloat16().float() - expected)
            for inputs in (left, rotated):
                assert rms(run(inputs, case, ATTENTION) - expected) < 1.2 * rounding
    for filled in FILLED_CASES:
        case = dataclasses.replace(filled, num_query_heads=8, num_kv_heads=1)
        chunks = all_as_chunks(case, CPU, torch.bfloat16)
        for inputs, first in ((chunks, 0), (counted(chunks), 1)):  # the decode is for another kernel
            found = run(inputs, case, ATTENTION)
            assert not found[10:49].any()
            torch.testing.assert_close(found[first:], in_plain_torch(inputs, case)[first:], rtol=2e-2, atol=2e-2)


def interpret_trial() -> None:
    """The trial at start is passed by this kernel, and not by others."""
    vars(blackwell)["lacking_for_blackwell"] = lambda: None
    target = Target(CPU, (10, 0), sm_count=3)
    assert blackwell.trial(target) is None
    right = reference._softmax_with_sinks
    reference._softmax_with_sinks = lambda scores, sinks: right(scores, sinks + 0.1)
    wrong = blackwell.trial(target)
    assert wrong is not None
    assert "off by 0.0" in wrong


def interpret_all() -> None:
    """In one process, a part of whose time are imports."""
    interpret_prompts()
    interpret_trial()


def test_prompts_in_the_interpreter() -> None:
    run_gluon(interpret_all)


def compile_prompts(arch: int, window: int | None, *, counted: bool = False, rotated: bool = False) -> Compiled:
    signature = {"pages": box_type(1, 1, 1, 64, 64)} | dict.fromkeys(("out_ptr", "q_ptr", "sinks_ptr"), "*bf16")
    signature |= dict.fromkeys(("table_ptr", "starts_ptr", "lens_ptr"), "*i32")
    signature |= dict.fromkeys(("q_stride", "table_stride", "first_sequence", "num_sequences", "num_tokens"), "i32")
    constants: dict[str, int | None] = {"KV_HEADS": 8, "WINDOW": window or 0, "STAGES": blackwell.STAGES}
    for name, kind, is_given in (("counts_ptr", "*i32", counted), ("cos_sin_ptr", "*fp32", not rotated)):
        if is_given:
            signature[name] = kind
        else:
            constants[name] = None
    registers = blackwell_prefill.LAUNCH_REGISTERS.value
    options = {"num_warps": 4, "maxnreg": registers, "launch_pdl": True}
    compiled = compile_ahead(
        blackwell_prefill.prefill_kernel, signature, constants, arch=arch, divisible=("q_stride",), **options
    )
    assert compiled.registers == registers
    return compiled


@pytest.mark.compiles
@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9), reason="Gluon of Triton 3.9; `make test-newest-triton`"
)
@pytest.mark.parametrize(
    ("window", "counted", "rotated"),
    [
        pytest.param(window, counted, rotated, marks=pytest.mark.slow if window or counted or rotated else ())
        for window in (None, 128)
        for counted in (False, True)
        for rotated in (False, True)
    ],
)
def test_the_kernel_multiplies_in_tensor_memory_what_tma_brings(
    window: int | None, counted: bool, rotated: bool
) -> None:
    compiled = compile_prompts(100, window, counted=counted, rotated=rotated)
    assemble_for(103, compiled)
    products = re.findall(r"tcgen05\.mma\.cta_group::1\.kind::f16 \[[^]]*\], (\[)?", compiled.ptx)
    assert len(products) == 24  # of 16 values: the scores of the first block, of the next, and the values; both groups
    assert products.count("[") == 8, "probabilities in tensor memory"
    assert compiled.ptx.count("tcgen05.commit") == 7, "nothing waits for a single product"
    assert compiled.ptx.count("cp.async.bulk.tensor.5d") == 2, "keys and values"
    assert "tcgen05.ld.sync.aligned.32x32b.x64" in compiled.ptx, "a thread has a row"
    assert compiled.ptx.count("ld.global.v4") >= 16, "queries"
    allocated = re.search(r"tcgen05\.alloc\S* \[[^]]*\], (\d+);", compiled.ptx)
    assert allocated is not None
    assert int(allocated[1]) <= 512
