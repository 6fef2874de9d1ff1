"""Compute capability 12.x (RTX 5090, DGX Spark): blackwell.py, with experts in Triton."""

from oscine.ops.platforms.blackwell import platform

PLATFORM = platform("blackwell_rtx", (12, 0), (12, 1))
