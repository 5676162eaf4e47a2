"""Triton kernels that occupy as many SMs as they have thread blocks. They need a GPU."""

import triton
import triton.language as tl

__all__ = ["copy_kernel", "count_kernel"]


@triton.jit
def count_kernel(out, n):
    """Each block counts to `n` in floating point and touches memory once."""
    value = tl.arange(0, 512).to(tl.float32)
    for _ in range(n):
        value = value * 0.999 + 1.0
    tl.store(out + tl.program_id(0) * 512 + tl.arange(0, 512), value)


@triton.jit
def copy_kernel(source, target, n, block: tl.constexpr):
    """Copy `n` elements, each block every so many pieces."""
    for start in range(tl.program_id(0) * block, n, tl.num_programs(0) * block):
        at = start + tl.arange(0, block)
        inside = at < n
        tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
