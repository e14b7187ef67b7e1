"""A small Triton kernel that the ptxas of CUDA 12.8 miscompiles for Hopper, found without a GPU."""

import triton
import triton.language as tl

from rebased.kernels.ptxas import check_kernel, newer_ptxas, ptxas_version, using_ptxas


@triton.jit
def two_products(x, y, t, out, N: tl.constexpr, M: tl.constexpr, W: tl.constexpr):
    """out [N, W] = (x y^T) t for x, y [N, M] and t [N, W], all contiguous."""
    n, m, w = tl.arange(0, N), tl.arange(0, M), tl.arange(0, W)
    x_tile = tl.load(x + n[:, None] * M + m[None, :])
    y_tile = tl.load(y + n[:, None] * M + m[None, :])
    scores = tl.dot(x_tile, tl.trans(y_tile))
    t_tile = tl.load(t + n[:, None] * W + w[None, :])
    tl.store(out + n[:, None] * W + w[None, :], tl.dot(scores.to(t_tile.dtype), t_tile))


def check(width: int) -> None:
    pointers = {"x": "*bf16", "y": "*bf16", "t": "*bf16", "out": "*fp32"}
    (report,) = check_kernel(two_products, {**pointers, "N": 64, "M": 64, "W": width}, arch="sm_90")
    print(f"  W = {width}: {report.products} products, {'; '.join(report.wrong) or 'all descriptors are sound'}")


if __name__ == "__main__":
    print(f"ptxas {ptxas_version()}")
    check(64)
    check(32)
    if newer := newer_ptxas():
        version, path = newer
        print(f"ptxas {version}")
        with using_ptxas(path):
            check(32)
