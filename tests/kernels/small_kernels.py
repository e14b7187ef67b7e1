"""Triton kernels that are none of ours, for the tests of kernels/ptxas.py: compiled in a second, never launched."""

import triton
import triton.language as tl


@triton.jit
def scale_kernel(x, y, n, factor, BLOCK: tl.constexpr = 128):
    """y = factor x, for n numbers."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


@triton.autotune(
    configs=[triton.Config({"BLOCK": 64}, num_warps=1), triton.Config({"BLOCK": 128}, num_warps=2, num_stages=1)],
    key=["n"],
)
@triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
@triton.jit
def copy_kernel(x, y, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """y = x, for n numbers."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(y + at, tl.load(x + at))
    else:
        tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["x"])
def general_kernel(x, y, n):
    """y = x, for n numbers, by one program whatever n is."""
    for at in range(n):
        tl.store(y + at, tl.load(x + at))


def not_a_kernel() -> None:
    """A plain function."""
