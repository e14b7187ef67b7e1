"""Where bf16's errors come from: the kernels' roundings redone in fp32 on the CPU, each changed in turn.

    PYTHONPATH=src python benchmarks/rounding.py            T = 256 (quadratic) and T = 4,096 (chunked)
    PYTHONPATH=src python benchmarks/rounding.py 1024 8192 -K 32

ReBased with keys of 16, or K, and values of 64, random bf16 inputs; relative errors of o, dq, dk, dv in thousandths,
and those of softmax attention as FlashAttention rounds it. The first line can be held against what benchmarks/ops.py
measures; below it what the kernels keep is rounded, and what they round is kept.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rebased.ops.polynomial import reference
from rebased.ops.polynomial.gpu.plan import make_plan

V, TOKENS = 64, 32_768
LAW_ERROR = 1e-4  # fp32 sums over some thousand tokens stay below this
TILE = 64  # queries and keys that meet at a time
Round = Callable[[Tensor], Tensor]


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def exact(x: Tensor) -> Tensor:
    return x


def but_the_first(round: Round) -> Round:
    """Of outputs [H,T,V]: those of the first tile are kept whole."""
    return lambda x: torch.cat([x[:, :TILE], round(x[:, TILE:])], 1)


class Roundings(NamedTuple):
    """What is rounded, and to what."""

    near: Round = exact  # similarities in the tile of the diagonal
    similarities: Round = bf16  # others, before they are multiplied with values, or with do
    near_slopes: Round = exact  # gradients at scores in that tile, before they are multiplied with keys or queries
    query_slopes: Round = bf16  # others, for dq; in chunks kept too
    key_slopes: Round = bf16  # others, for dk
    output: Round = but_the_first(bf16)  # o, of which delta = -(do . o) is taken
    sums: Round = bf16  # products of two columns that are summed over chunks; in long sequences kept
    features: Round = bf16  # where queries meet such a sum
    grad_features: Round = exact  # where keys do, in the backward pass
    states: Round = bf16  # running totals, and their gradients
    results: Round = bf16  # what is handed out


NOTHING = Roundings(*[exact] * len(Roundings._fields))
PLAIN = Roundings(*[bf16] * len(Roundings._fields))


class Inputs(NamedTuple):
    q: Tensor  # [H,T,K], the scale put on
    k: Tensor
    v: Tensor  # [H,T,V]
    do: Tensor
    seen: Tensor  # [T,T]


def make_inputs(T: int, seed: int, heads: int, K: int = 16) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (bf16(torch.randn(heads, T, width, generator=generator)) for width in (K, K, V, V))
    return Inputs(q / K**0.25, k / K**0.25, v, do, torch.ones(T, T, dtype=torch.bool).tril())


def features(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x_i x_j for i <= j [...,F], and the i and the j of each."""
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1])
    return x[..., i] * x[..., j], i, j


def fold(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient at x [H,T,K] of one [H,T,F] at its features."""
    _, i, j = features(x)
    zeros = torch.zeros_like(x)
    return zeros.index_add(-1, i, gradient * x[..., j]).index_add(-1, j, gradient * x[..., i])


def before(sums: Tensor, backward: bool = False) -> Tensor:
    """[H,chunks,...] summed over the chunks before each, or after it."""
    if backward:
        return before(sums.flip(1)).flip(1)
    return sums.cumsum(1) - sums


def rebased(inputs: Inputs, rounding: Roundings, chunk: int | None) -> list[Tensor]:
    """o, dq, dk, dv: keys of the own chunk one by one, those before it through their state."""
    q, k, v, do, seen = inputs
    H, T, _ = q.shape
    if chunk is not None:
        of = torch.arange(T) // chunk
        seen = seen & (of[:, None] == of[None, :])
    size = chunk or T

    def cut(x: Tensor) -> Tensor:
        return x.view(H, T // size, size, -1)

    phi_q, i, j = features(q)
    phi_k, twice = features(k)[0], torch.where(i == j, 1.0, 2.0)
    rounded_q, rounded_k = rounding.features(phi_q), rounding.sums(phi_k)
    s = (q @ k.mT).masked_fill(~seen, 0)
    tile = torch.arange(T) // TILE
    diagonal = tile[:, None] == tile[None, :]

    def rounded(x: Tensor, near: Round, others: Round) -> Tensor:
        return torch.where(diagonal, near(x), others(x))

    similarities = rounded(s * s, rounding.near, rounding.similarities)
    kv = rounding.states(before(cut(rounded_k).mT @ cut(v)) * twice[:, None])
    z = before(cut(rounded_k).sum(2)) * twice
    far = (cut(rounded_q) @ kv).view(H, T, V)
    total = similarities.sum(-1) + (cut(rounded_q) @ z.unsqueeze(-1)).view(H, T)
    scale = 1 / total.unsqueeze(-1)
    o = (similarities @ v + far) * scale

    delta = -(do * rounding.output(o)).sum(-1, keepdim=True)
    slope = (do @ v.mT + delta) * s
    gradient = cut(do) @ kv.mT + cut(delta) * z[:, :, None]
    slopes = rounded(slope, rounding.near_slopes, rounding.query_slopes)
    dq = (2 * slopes @ k + fold(gradient.reshape(H, T, -1), q)) * scale

    weighted = rounding.sums((q * scale)[..., i] * q[..., j])
    d_kv = rounding.states(before(cut(weighted).mT @ cut(do), backward=True) * twice[:, None])
    d_z = before((cut(weighted) * cut(delta)).sum(2), backward=True) * twice
    gradient = cut(v) @ d_kv.mT + d_z[:, :, None]
    slopes = rounded(slope * scale, rounding.near_slopes, rounding.key_slopes)
    dk = 2 * slopes.mT @ q + fold(gradient.reshape(H, T, -1), k)
    weights = rounded(s * s * scale, rounding.near, rounding.similarities)
    dv = weights.mT @ do + (cut(rounding.grad_features(phi_k)) @ d_kv).view(H, T, V)
    return [rounding.results(x) for x in (o, dq, dk, dv)]


def softmax(inputs: Inputs, rounding: Roundings) -> list[Tensor]:
    q, k, v, do, seen = inputs
    s = (q @ k.mT).masked_fill(~seen, -torch.inf)
    weights = torch.softmax(s, -1)
    top = s.amax(-1, keepdim=True)
    o = rounding.similarities(torch.exp(s - top)) @ v / torch.exp(s - top).sum(-1, keepdim=True)
    slope = weights * (do @ v.mT - (do * rounding.output(o)).sum(-1, keepdim=True))
    slope, weights = rounding.key_slopes(slope), rounding.similarities(weights)
    return [rounding.results(x) for x in (o, slope @ k, slope.mT @ q, weights.mT @ do)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="*", type=int, default=[256, 4096], metavar="T")
    parser.add_argument("-K", type=int, default=16, help="width of keys")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="per length, over all seeds")
    args = parser.parse_args()
    K, found = args.K, dict[tuple[int, str], list[float]]()
    for T in args.lengths:
        plan = make_plan(T, K, V, low=False, products="bf16", has_state=False)
        chunk, usual = plan.chunk, Roundings(sums=exact if plan.hi_lo else bf16)
        if chunk is not None:
            usual = usual._replace(query_slopes=exact)
        cases = {"as the kernels do": usual}
        for name, kept in usual._asdict().items():
            change, how = (exact, "exact") if kept is bf16 else (bf16, "in bf16")
            cases[f"{name} {how}"] = usual._replace(**{name: change})
        cases["all in bf16"] = PLAIN
        errors, norms = dict[str, Tensor](), dict[str, Tensor]()
        heads = max(1, 2048 // T)
        for seed in range(args.tokens // T // heads):
            inputs = make_inputs(T, seed, heads, K)
            law = rebased(inputs, NOTHING, chunk)
            if seed == 0:
                check_law(inputs, law)
            for name, case in cases.items():
                add(errors, norms, name, rebased(inputs, case, chunk), law)
            add(errors, norms, "softmax", softmax(inputs, PLAIN), softmax(inputs, NOTHING))
        found |= {(T, name): (errors[name] / norms[name]).sqrt().tolist() for name in errors}
    print(f"{'T':>6}  {'rounded':22}     o    dq    dk    dv   (thousandths)")
    for (T, name), each in found.items():
        print(f"{T:6}  {name:22}" + "".join(f"{1e3 * error:6.2f}" for error in each))


def check_law(inputs: Inputs, law: Sequence[Tensor]) -> None:
    """SystemExit if the computation without roundings is not the equation, o and its gradients."""
    q, k, v, do = (x.transpose(0, 1).unsqueeze(0).double() for x in inputs[:4])  # [1,T,H,*]
    for x in (q, k, v):
        x.requires_grad_()
    o = reference.attend(q, k, v, coefficients=(0.0, 0.0, 1.0), scale=1.0, eps=0.0)
    for name, got, want in zip(["o", "dq", "dk", "dv"], law, (o, *torch.autograd.grad(o, (q, k, v), do)), strict=True):
        want = want.detach()[0].transpose(0, 1)  # [H,T,*]
        error = float((got - want).norm() / want.norm())
        if not error < LAW_ERROR:
            raise SystemExit(f"{name} without roundings is off by {error:.1e} of the equation: nothing was measured")


def add(
    errors: dict[str, Tensor], norms: dict[str, Tensor], name: str, got: Sequence[Tensor], want: Sequence[Tensor]
) -> None:
    """Squares, summed over all seeds."""
    square = torch.stack([(a - b).double().square().sum() for a, b in zip(got, want, strict=True)])
    norm = torch.stack([b.double().square().sum() for b in want])
    errors[name], norms[name] = errors.get(name, 0) + square, norms.get(name, 0) + norm


if __name__ == "__main__":
    main()
