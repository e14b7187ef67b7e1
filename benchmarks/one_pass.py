"""One forward and backward pass of polynomial attention in either regime: something to run under a tool.

    PYTHONPATH=src compute-sanitizer --tool memcheck python benchmarks/one_pass.py       and --tool racecheck

ReBased with keys of 16 and values of 64 in bf16, at lengths that fill no tile.
"""

import argparse

import torch

from rebased.ops import REBASED, poly_attention
from rebased.ops.backend import has_gpu

LENGTHS = (200, 2100, 8300)  # quadratic; chunked; chunked, with features summed as two numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    if device == "cuda" and not has_gpu():
        raise SystemExit("no CUDA device here; --device cpu runs the same pass without kernels")
    for T in LENGTHS:
        q, k, v = (
            torch.randn(1, T, 2, width, device=device, dtype=torch.bfloat16, requires_grad=True)
            for width in (16, 16, 64)
        )
        o = poly_attention(q, k, v, coefficients=REBASED)
        grads = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
        print(f"T = {T:,}: {'finite' if all(x.isfinite().all() for x in (o, *grads)) else 'NOT finite'}")


if __name__ == "__main__":
    main()
