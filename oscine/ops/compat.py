"""Names that differ between Triton 3.6, 3.7, 3.8 and 3.9. Kernels import them from here and check no version.

| here | 3.6 | 3.7 | 3.8 | 3.9 |
|---|---|---|---|---|
| barrier() | gl.thread_barrier | gl.barrier | as 3.7 | as 3.7 |
| async_load(descriptor, at, barrier, memory) | tma.async_copy_global_to_shared | as 3.6 | tma.async_load | as 3.8 |
| reinterpret(memory, dtype, shape, layout) | memory._reinterpret | as 3.6 | as 3.6 | memory.reinterpret |

These differences have no common name, so kernels avoid them:

| avoided | because | instead |
|---|---|---|
| reinterpret of a slice | an error in 3.8 | reinterpret the whole buffer, then index it |
| a tuple of dtypes that a kernel multiplies | not a constant since 3.8 | a gl.constexpr of the module |
| a global constant times a tensor | a constant in the interpreter of 3.9 | the tensor times the constant |
| float16 to bfloat16 | a slow instruction in 3.9 | through float32 |
| gdc_wait after loads for a product | they stay in registers in 3.9, which spills | launch.after_wait |
| AsyncCompileMode.submit with three arguments | 3.9 passes a fourth | compile_together.py takes any number |
| a launch without enable_fp_fusion | fusion is on up to 3.9, off from 3.10 | Target.launch_options, or the option |
| products with 128 rows in four warps, on 10.x | 3.8 and 3.9 spill | eight warps |
| no maxnreg for prefill attention, on 10.x | 3.8 stops at 128 registers and spills | maxnreg |

Not avoided: in the experts' tilings for many tokens, 3.9 spills up to 40 bytes per thread, outside of the loops.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
