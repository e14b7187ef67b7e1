"""A report for flash-linear-attention: in half precision parallel_rebased gives wrong gradients of q and k.

    python benchmarks/fla_gradient.py

It needs torch, flash-linear-attention and a GPU, and nothing of this repository. For each seed it prints the relative
errors (Frobenius norm) of o, dq, dk and dv against the equation in fp64, and how much of dq's squared error stands in
the first 8 of the T tokens.

What happens: the kernel returns the numerator o and the sum of similarities z, both rounded to the input dtype, and
autograd divides them. So the gradients of o and z are rounded too, and the backward kernel adds them:

    ds_ij = do_i . v_j + dz_i,   do_i = dy_i / (z_i + eps),   dz_i = -(dy_i . o_i) / (z_i + eps)^2

The two terms cancel; at the first token exactly. What is left is their rounding, about 2^-9 |dy_i . v_j| / z_i in bf16.
It is large where z_i is small: where a query is nearly orthogonal to the few keys before it. The error depends on the
inputs, not on the shape. In fp16 dz can also overflow. In fp32 the same code is right. A remedy is to return o and z in
fp32 and to divide in fp32; another is to divide in the kernel and to compute ds_ij = dy_i . (v_j - y_i) / (z_i + eps).
"""

import argparse

import torch
from fla.ops.rebased import parallel_rebased

NAMES = ("o", "dq", "dk", "dv")
FIRST = 8


def equation(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, eps: float) -> torch.Tensor:
    """[B,T,H,V]: causal attention with weights (q . k)^2 / K, divided by their sum plus eps."""
    s = torch.einsum("bihk,bjhk->bhij", q, k) * q.shape[-1] ** -0.5
    weights = s.square().tril()
    return torch.einsum("bhij,bjhv->bihv", weights / (weights.sum(-1, keepdim=True) + eps), v)


def with_gradients(attend, q, k, v, dy) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """o, dq, dk, dv."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attend(*inputs)
    return [o.detach(), *torch.autograd.grad(o, inputs, dy.to(o.dtype))]


def main() -> None:
    """Print one line per dtype, eps and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--shape", type=int, nargs=5, default=(8, 512, 12, 16, 64), metavar=("B", "T", "H", "K", "V"))
    args = parser.parse_args()
    B, T, H, K, V = args.shape
    print(f"B {B}, T {T}, H {H}, K {K}, V {V}; torch {torch.__version__}")
    print(f"{'dtype':10}{'eps':>8}{'seed':>6}" + "".join(f"{name:>10}" for name in NAMES) + f"  dq in first {FIRST}")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for eps in (1e-5, 1e-12):
            for seed in range(args.seeds):
                generator = torch.Generator().manual_seed(seed)
                made = [torch.randn(B, T, H, w, generator=generator).to(dtype) for w in (K, K, V, V)]
                q, k, v, dy = (x.to(args.device) for x in made)
                got = with_gradients(lambda *x, eps=eps: parallel_rebased(*x, eps=eps), q, k, v, dy)
                exact = [x.double() for x in (q, k, v, dy)]
                want = with_gradients(lambda *x, eps=eps: equation(*x, eps), *exact)
                errors = [float((x.double() - y).norm() / y.norm()) for x, y in zip(got, want, strict=True)]
                squared = (got[1].double() - want[1]).square().sum((0, 2, 3))  # [T]
                share = float(squared[:FIRST].sum() / squared.sum())
                shown = "".join(f"{error:10.1e}" for error in errors)
                print(f"{str(dtype).removeprefix('torch.'):10}{eps:8.0e}{seed:6}{shown}{share:10.0%}")


if __name__ == "__main__":
    main()
