"""The passes of launch.py and selected.py in plain torch: what computes a call whose kernels are wrong on this machine.

They have the inputs and outputs of the kernels. What only kernels need is left empty: `BY_TORCH` remembers for which
calls, so that their backward pass goes this way too.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rebased.ops.polynomial import chunked
from rebased.ops.polynomial.gpu.call import Call, keeps_o_lo, prepare, product_dtype
from rebased.ops.polynomial.gpu.layout import canonical, tiled
from rebased.ops.polynomial.recurrent import extend_
from rebased.ops.polynomial.state import Coefficients, PolyState, init_poly_state

BY_TORCH: set[tuple[Any, ...]] = set()
"""Sizes of the calls whose forward pass torch computes (Call.sizes)."""


def call_of(given: Any) -> Call:
    """The Call of ForwardInputs or BackwardInputs."""
    has_state = given.kv_initial is not None or given.want_final
    return prepare(given.q, given.v, given.cu_seqlens, given.c0 != 0 or given.c1 != 0, has_state)


def _attend(
    given: Any, q: Tensor, k: Tensor, v: Tensor, before: PolyState | None, g: Tensor | None
) -> tuple[Tensor, PolyState | None]:
    """o and, if wanted, the tiled state at the end, after a tiled state or none."""
    c, (B, T, H, K), V = (given.c0, given.c1, given.c2), q.shape, v.shape[3]
    options: dict[str, Any] = {"coefficients": c, "scale": 1.0, "eps": given.eps}
    bounds = [0, T] if given.cu_seqlens is None else given.cu_seqlens.tolist()
    sequences = B if given.cu_seqlens is None else len(bounds) - 1
    if before is None:
        start = init_poly_state(sequences, H, K, V, c, device=q.device, dtype=q.dtype)
    else:
        start = canonical(before, V, K, c)
    outputs, states = [], []
    for n, (i, j) in enumerate(pairwise(bounds)):
        own = start if given.cu_seqlens is None else PolyState(start.kv[n : n + 1], start.z[n : n + 1])
        if i == j:
            states.append(own)
            continue
        gate: dict[str, Any] = {} if g is None else {"log_decay": g[:, i:j]}
        o, after = chunked.extend(q[:, i:j], k[:, i:j], v[:, i:j], own, **options, **gate)
        outputs.append(o)
        states.append(after)
    o = torch.cat(outputs, dim=1)
    if not given.want_final:
        return o, None
    return o, tiled(PolyState(*(torch.cat(each) for each in zip(*states, strict=True))), K, c)


def forward(given: Any, gradients: bool = False) -> tuple[Any, ...]:
    """launch.forward: the fields of ForwardOutputs."""
    call = call_of(given)
    BY_TORCH.add(call.sizes)
    before = None if given.kv_initial is None else PolyState(given.kv_initial, given.z_initial)
    with torch.no_grad():
        o, after = _attend(given, given.q, given.k, given.v, before, given.log_decay)
    o_lo = torch.zeros(call.o_lo_shape, dtype=o.dtype, device=o.device) if keeps_o_lo(given.v) else None
    inverse = torch.zeros(call.B, call.H, call.T, dtype=torch.float32, device=o.device)
    kv = z = None
    if call.plan.chunk is not None:
        kv_shape, z_shape = call.state_shapes(call.count(call.chunk).total)
        kv = torch.zeros(kv_shape, dtype=product_dtype(given.q), device=o.device)
        z = torch.zeros(z_shape, dtype=torch.float32, device=o.device)
    return o.contiguous(), o_lo, inverse, kv, z, *(after or (None, None))


def backward(given: Any) -> tuple[Any, ...]:
    """launch.backward: the fields of Gradients."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (given.q, given.k, given.v)]
        g = None if given.log_decay is None else given.log_decay.detach().requires_grad_()
        before = None
        if given.kv_initial is not None:
            before = PolyState(*(x.detach().requires_grad_() for x in (given.kv_initial, given.z_initial)))
        q, k, v = inputs
        o, after = _attend(given, q, k, v, before, g)
        ends, grads = [o], [given.do]
        for x, grad in zip(after or (), (given.d_kv, given.d_z), strict=False):
            if grad is not None:
                ends.append(x)
                grads.append(grad)
        wanted = [*inputs, *(before or ()), *(() if g is None else (g,))]
        found = torch.autograd.grad(ends, wanted, grads, materialize_grads=True)
    dq, dk, dv, *others = (x.contiguous() for x in found)
    dg = None if g is None else others.pop()
    return dq, dk, dv, *(others or (None, None)), dg


def decode(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, c0: float, c1: float, c2: float, scale: float, eps: float,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """launch.decode."""
    after = PolyState(kv.clone(memory_format=torch.contiguous_format), z.clone(memory_format=torch.contiguous_format))
    return decode_(q, k, v, after, (c0, c1, c2), scale, eps, log_decay), *after


def decode_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: PolyState,
    c: Coefficients,
    scale: float,
    eps: float,
    log_decay: Tensor | None = None,
) -> Tensor:
    """launch.decode_."""
    gate = {} if log_decay is None else {"log_decay": log_decay}
    return extend_(q, k, v, state, coefficients=c, scale=scale, eps=eps, **gate)


def _similarities(q: Tensor, k: Tensor, at: Tensor, c: Coefficients) -> Tensor:
    """[B, H, n, T] of queries at positions [B, n], zero for later keys."""
    c0, c1, c2 = c
    s = torch.einsum("bihk,bjhk->bhij", q, k)
    seen = at[:, None, :, None] >= torch.arange(k.shape[1], device=k.device)
    return torch.where(seen, c0 + s * (c1 + c2 * s), 0)


def _average(sim: Tensor, v: Tensor, inverse: Tensor) -> Tensor:
    return (torch.einsum("bhij,bjhv->bihv", sim, v) * inverse.transpose(1, 2).unsqueeze(-1)).contiguous()


def attend_at(
    q: Tensor, k: Tensor, v: Tensor, at: Tensor, c0: float, c1: float, c2: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """selected.poly_at."""
    sim = _similarities(q.float(), k.float(), at, (c0, c1, c2))
    inverse = 1 / (sim.sum(-1) + eps)
    wide = _average(sim, v.float(), inverse)
    o = wide.to(v.dtype)
    return o, (wide - o.float()).to(v.dtype) if keeps_o_lo(v) else o.new_empty(0), inverse


def attend_at_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, at: Tensor, o: Tensor, o_lo: Tensor, inverse: Tensor,
    c0: float, c1: float, c2: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """selected.poly_at_backward."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        wide_q, wide_k, wide_v = (x.float() for x in inputs)
        sim = _similarities(wide_q, wide_k, at, (c0, c1, c2))
        total = sim.sum(-1)
        rest = (1 / inverse - total).detach()  # eps
        dq, dk, dv = torch.autograd.grad(_average(sim, wide_v, 1 / (total + rest)), inputs, do.float())
    return dq, dk, dv
