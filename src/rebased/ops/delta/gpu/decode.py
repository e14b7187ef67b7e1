# mypy: allow-untyped-defs
"""One token of the delta rule, from the state alone: the state is read twice and written once. Forward only.

One kernel computes all that the public functions offer: degree 1 and 2, centred squares, with and without a beta, a
decay per head or per channel. All numbers are fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebased.ops.comparison import pick, some
from rebased.ops.kernel_launch import launch
from rebased.ops.polynomial import chunked_recurrence
from rebased.ops.polynomial.chunked_recurrence import Rule
from rebased.ops.polynomial.gpu.call import rows_of
from rebased.ops.polynomial.gpu.layout import monomials
from rebased.ops.polynomial.gpu.plan import padded
from rebased.ops.polynomial.state import Coefficients
from rebased.ops.self_check import checked

TILE = {"BF": 32, "STAGES": 3, "num_warps": 2}  # BF: features that a program reads at a time
MOST_VALUES = 64  # of a program
NUMBERS_CHECKED = 2**20  # of states, at most


@triton.jit
def _features(x, unit, first, second, f, F: tl.constexpr, K: tl.constexpr):
    """The features f of x divided by its length: x_first x_second, where x_K means 1."""
    i = tl.load(first + f, mask=f < F, other=K)
    j = tl.load(second + f, mask=f < F, other=K)
    left = tl.load(x + i, mask=i < K, other=0.0).to(tl.float32) * unit
    right = tl.load(x + j, mask=j < K, other=0.0).to(tl.float32) * unit
    return tl.where(i < K, left, 1.0) * tl.where(j < K, right, 1.0)


@triton.jit
def _faded(state, at, mask, g, first, f, F: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr):
    """Rows of the state after its decay."""
    rows = tl.load(state + at, mask=mask, other=0.0)
    if GATE == "head":
        rows *= tl.exp(tl.load(g).to(tl.float32))
    if GATE == "channel":
        i = tl.load(first + f, mask=f < F, other=K)
        rows *= tl.exp(tl.load(g + i, mask=i < K, other=0.0).to(tl.float32))[:, None]
    return rows


@triton.jit
def _unit(x, eps, K: tl.constexpr, KP: tl.constexpr):
    """One over the length of x."""
    at = tl.arange(0, KP)
    row = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(row * row, 0) + eps)


@triton.jit
def decode_kernel(
    q, k, v, beta, g, state, after, o, first, second, weights,
    q_batch, q_head, k_batch, k_head, v_batch, v_head,
    H, eps,
    F: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr,
    STAGES: tl.constexpr, NORMALISE: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """o [B, H, V] and the state after one token, after [B, H, F, V], which may be `state` itself; a program takes BV
    values of a head.

    `weights` [F] multiply the features that read a state. beta [B, H], or None: the value is added as it is. GATE:
    "none"; "head", g [B, H]; or "channel", g [B, H, K], of features of degree 1.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    columns = tl.program_id(0) % TILES * BV + tl.arange(0, BV)
    pid = tl.program_id(0) // TILES
    batch, h = (pid // H).to(tl.int64), (pid % H).to(tl.int64)
    q += batch * q_batch + h * q_head
    k += batch * k_batch + h * k_head
    if GATE == "head":
        g += pid
    if GATE == "channel":
        g += pid * K
    inside = columns < V
    change = tl.load(v + batch * v_batch + h * v_head + columns, mask=inside, other=0.0).to(tl.float32)
    q_unit = _unit(q, eps, K, KP) if NORMALISE else 1.0
    k_unit = _unit(k, eps, K, KP) if NORMALISE else 1.0
    here = pid.to(tl.int64) * F
    known, out = tl.zeros([BV], tl.float32), tl.zeros([BV], tl.float32)
    match = tl.zeros([BF], tl.float32)
    for start in tl.range(0, F, BF, num_stages=STAGES):
        f = start + tl.arange(0, BF)
        w = tl.load(weights + f, mask=f < F, other=0.0)
        phi_q = w * _features(q, q_unit, first, second, f, F, K)
        phi_k = _features(k, k_unit, first, second, f, F, K)
        at, mask = (here + f)[:, None] * V + columns[None, :], (f < F)[:, None] & inside[None, :]
        rows = _faded(state, at, mask, g, first, f, F, K, GATE)
        known += tl.sum((w * phi_k)[:, None] * rows, 0)
        out += tl.sum(phi_q[:, None] * rows, 0)
        match += phi_q * phi_k
    if beta is not None:
        change = tl.load(beta + pid).to(tl.float32) * (change - known)
    out += tl.sum(match, 0) * change
    tl.store(o + pid.to(tl.int64) * V + columns, out.to(o.dtype.element_ty), mask=inside)
    for start in tl.range(0, F, BF, num_stages=STAGES):
        f = start + tl.arange(0, BF)
        phi_k = _features(k, k_unit, first, second, f, F, K)
        at, mask = (here + f)[:, None] * V + columns[None, :], (f < F)[:, None] & inside[None, :]
        rows = _faded(state, at, mask, g, first, f, F, K, GATE)
        tl.store(after + at, rows + phi_k[:, None] * change[None, :], mask=mask)


def _in_torch(q, k, v, beta, decay, state, c0, c1, c2, normalise, eps):
    """As `decode`."""
    dtype = state.dtype
    q, k, u = (x.to(dtype) for x in (q, k, v))
    if normalise:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) for x in (q, k))
    decay, beta = (None if x is None else x.to(dtype) for x in (decay, beta))
    o, after = chunked_recurrence.recur(q, k, u, decay, beta, state, Rule((c0, c1, c2), 1.0, dtype))
    return o.to(v.dtype), after


def _in_torch_(q, k, v, beta, decay, state, *others):
    """As `decode_`."""
    o, after = _in_torch(q, k, v, beta, decay, state, *others)
    state.copy_(after)
    return o


def _some_rows(args, results):
    """The call for some sequences."""
    rows = some(len(args[0]), max(2, NUMBERS_CHECKED // args[5][0].numel()))

    def of(x):
        return pick(x, 0, rows) if isinstance(x, Tensor) else x

    return tuple(map(of, args)), [of(x) for x in results]


@checked(_in_torch, sample=_some_rows)
def decode(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, state: Tensor, c0: float, c1: float,
    c2: float, normalise: bool, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o [B, 1, H, V], the state after) of one token: q, k [B, 1, H, K], v [B, 1, H, V], beta [B, 1, H] or None,
    log_decay [B, 1, H], [B, 1, H, K] or None, a public state [B, H, F, V]."""
    after = torch.empty_like(state, memory_format=torch.contiguous_format)
    return _decode(q, k, v, beta, log_decay, state.contiguous(), after, (c0, c1, c2), normalise, eps), after


@checked(_in_torch_, sample=_some_rows)
def decode_(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, state: Tensor, c0: float, c1: float,
    c2: float, normalise: bool, eps: float,
) -> Tensor:  # fmt: skip
    """o of `decode`. The state, which is contiguous, is overwritten by the one after the token."""
    return _decode(q, k, v, beta, log_decay, state, state, (c0, c1, c2), normalise, eps)


def _decode(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, state: Tensor, after: Tensor,
    coefficients: Coefficients, normalise: bool, eps: float,
) -> Tensor:  # fmt: skip
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    (B, _, H, K), (F, V) = q.shape, state.shape[2:]
    beta, g = (None if x is None else x.contiguous() for x in (beta, log_decay))
    gate = "none" if g is None else "channel" if g.ndim == 4 else "head"
    o, values = torch.empty(v.shape, device=v.device, dtype=v.dtype), min(padded(V), MOST_VALUES)
    launch(
        decode_kernel, (B * H * triton.cdiv(V, values),),
        q, k, v, beta, g, state, after, o, *monomials(K, coefficients, 1.0, q.device),
        q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2), H, eps,
        F=F, K=K, KP=padded(K), V=V, BV=values, **TILE, NORMALISE=normalise, GATE=gate,
        overwrites=(state,) if after is state else (),
    )  # fmt: skip
    return o
