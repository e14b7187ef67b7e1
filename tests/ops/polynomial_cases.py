"""Inputs and calls of polynomial attention's kernels, and the same of the equation in fp64, to compare."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from polynomial_inputs import Shape, inputs
from rebased.ops import (
    Backend,
    Coefficients,
    PolyState,
    init_poly_state,
    poly_attention,
    poly_attention_at,
    poly_attention_extend,
)
from tolerances import assert_close, assert_small_error

MIXED: Coefficients = (0.3, -0.2, 0.7)
EVEN: Coefficients = (1.0, 0.0, 0.5)
NAMES = ("o", "dq", "dk", "dv")
STATE_NAMES = ("o", "kv", "z", "dq", "dk", "dv", "d kv", "d z")
Cut = Callable[..., None]
"""The fixture of conftest.py: chunk length (None: quadratic), rows and step of the tiles."""


def tensors(shape: Shape, coefficients: Coefficients, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v, do in this dtype, and the same numbers in fp64."""
    given = list(inputs(shape, coefficients=coefficients, dtype=dtype))
    return given, [x.detach().double().requires_grad_(x.requires_grad) for x in given]


def attend(given: list[Tensor], coefficients: Coefficients, **options: Any) -> list[Tensor]:
    q, k, v, do = given
    backend = "reference" if q.dtype == torch.float64 else "triton"
    o = poly_attention(q, k, v, coefficients=coefficients, backend=backend, **options)  # type: ignore[arg-type]
    assert o.dtype == q.dtype
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


def some_positions(batch: int, n: int, T: int, seed: int = 0) -> Tensor:
    """[batch, n], in any order and with repetitions where n is more than T."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(max(n, T), generator=generator)[:n] % T for _ in range(batch)])


def at(x: Tensor, positions: Tensor) -> Tensor:
    """x [B, T, H, W] at positions [B, n]: [B, n, H, W]."""
    return x.gather(1, positions[:, :, None, None].expand(-1, -1, *x.shape[2:]))


def attend_at(given: list[Tensor], positions: Tensor, coefficients: Coefficients, backend: Backend) -> list[Tensor]:
    """o at these positions and its gradients, dq [B, T, H, K] at all: in fp64 taken from attention of all queries."""
    q, k, v, do = given
    if q.dtype == torch.float64:
        o = at(poly_attention(q, k, v, coefficients=coefficients, backend="reference"), positions)
    else:
        o = poly_attention_at(at(q, positions), k, v, positions, coefficients=coefficients, backend=backend)
    assert o.dtype == q.dtype
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), at(do, positions))]


def extend(
    given: list[Tensor], start: PolyState, lengths: list[int], coefficients: Coefficients, wanted: slice = slice(None)
) -> list[Tensor]:
    """o, the state after, and the gradients of a loss of both, in pieces of these lengths that follow a past."""
    q, k, v, do = given
    backend = "reference" if q.dtype == torch.float64 else "triton"
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    before = state = PolyState(*(x.to(wide).requires_grad_() for x in start))
    outputs = []
    for piece in zip(*(x.split(lengths, dim=1) for x in (q, k, v)), strict=True):
        o, state = poly_attention_extend(*piece, state, coefficients=coefficients, backend=backend)  # type: ignore[arg-type]
        outputs.append(o)
    o = torch.cat(outputs, dim=1)
    generator = torch.Generator().manual_seed(2)
    d_state = [torch.randn(x.shape, generator=generator).to(wide) for x in state]
    ends, d_ends = (o, *state)[wanted], (do, *d_state)[wanted]
    gradients = torch.autograd.grad(ends, (q, k, v, *before), d_ends, materialize_grads=True)
    return [o.detach(), *(x.detach() for x in state), *gradients]


def past(shape: Shape, coefficients: Coefficients) -> PolyState:
    """The state after nine tokens, in fp64."""
    q, k, v, _ = inputs(shape._replace(T=9), coefficients=coefficients, seed=1)
    state = init_poly_state(shape.B, shape.H, shape.K, shape.V, coefficients, dtype=torch.float64)
    _, state = poly_attention_extend(q, k, v, state, coefficients=coefficients, backend="reference")
    return PolyState(*(x.detach() for x in state))


def check_packed_extend(
    shape: Shape,
    bounds: list[int],
    coefficients: Coefficients,
    dtype: torch.dtype,
    backend: Backend,
    device: str = "cpu",
) -> None:
    """Packed documents that follow states, one each, against every document by itself in fp64."""
    given, exact = tensors(shape, coefficients, dtype)
    start = past(shape._replace(B=len(bounds) - 1), coefficients)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    results: list[list[Tensor]] = []
    with torch.no_grad():
        q, k, v = (x.to(device) for x in given[:3])
        state = PolyState(*(x.to(device, wide) for x in start))
        cu_seqlens = torch.tensor(bounds, device=device)
        o, after = poly_attention_extend(
            q, k, v, state, coefficients=coefficients, cu_seqlens=cu_seqlens, backend=backend
        )
        results.append([x.cpu() for x in (o, *after)])
        alone = []
        for n, (i, j) in enumerate(pairwise(bounds)):
            q, k, v = (x[:, i:j] for x in exact[:3])
            before = PolyState(start.kv[n : n + 1], start.z[n : n + 1])
            alone.append(poly_attention_extend(q, k, v, before, coefficients=coefficients, backend="reference"))
        results.append([torch.cat([o for o, _ in alone], dim=1)])
        results[1] += [torch.cat(each) for each in zip(*(state for _, state in alone), strict=True)]
    if dtype == torch.float64:
        assert_close(*results, ("o", "kv", "z"))
    else:
        assert_small_error(*results, ("o", "kv", "z"), dtype)
