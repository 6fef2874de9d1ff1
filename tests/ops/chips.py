"""The chips that kernels are compiled ahead for, by compute capability times 10."""

import torch

from oscine.ops.target import Target

# SMs, and KiB of shared memory that a program can have, by NVIDIA's tables; A100, A10, Jetson Orin, L4, H200,
# B200, B300, RTX 5090, GB10
SIZES = {
    80: (108, 163),
    86: (72, 99),
    87: (16, 163),
    89: (58, 99),
    90: (132, 227),
    100: (148, 227),
    103: (160, 227),
    120: (170, 99),
    121: (48, 99),
}
# Tensors on the meta device have shapes, and no memory: kernels launched on them can only be compiled.
CHIPS = {arch: Target(torch.device("meta"), divmod(arch, 10), sms, kib * 1024) for arch, (sms, kib) in SIZES.items()}
# Compute units, and KiB of local data share, by AMD's tables; MI300X, MI355X
AMD_SIZES = {"gfx942": (304, 64), "gfx950": (256, 160)}
AMD_CHIPS = {
    name: Target(torch.device("meta"), sm_count=units, shared_memory=kib * 1024, architecture=name)
    for name, (units, kib) in AMD_SIZES.items()
}
