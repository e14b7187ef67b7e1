"""One forward and backward pass of polynomial attention in either regime: something to run under a tool.

    PYTHONPATH=src compute-sanitizer --tool memcheck python benchmarks/one_pass.py       and --tool racecheck

ReBased at lengths that fill no tile: in bf16 and TF32, with narrow and with wide keys and values.
"""

import argparse

import torch

from rebased.ops import REBASED, poly_attention
from rebased.ops.backend import has_gpu

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = (  # T, K, V, dtype
    (200, 16, 64, BF16),  # quadratic
    (2100, 16, 64, BF16),  # chunked
    (8300, 16, 64, BF16),  # chunked, with features summed as two numbers
    (200, 16, 5, FP32),
    (2100, 16, 5, FP32),
    (200, 24, 64, BF16),
    (200, 128, 128, BF16),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    if device == "cuda" and not has_gpu():
        raise SystemExit("no CUDA device here; --device cpu runs the same pass without kernels")
    torch.set_float32_matmul_precision("high")
    for T, K, V, dtype in SHAPES:
        q, k, v = (torch.randn(1, T, 2, w, device=device, dtype=dtype, requires_grad=True) for w in (K, K, V))
        o = poly_attention(q, k, v, coefficients=REBASED)
        grads = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
        finite = all(x.isfinite().all() for x in (o, *grads))
        what = f"T = {T:,}, K = {K}, V = {V}, {str(dtype).removeprefix('torch.')}"
        print(f"{what}: {'finite' if finite else 'NOT finite'}")


if __name__ == "__main__":
    main()
