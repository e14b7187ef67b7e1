"""WKV, the recurrence of RWKV-4: an average of past values whose weights decay at a rate of each channel's own.

    wkv_t = (sum_{i<t} e^{k_i - (t-1-i) r} v_i + e^{u + k_t} v_t) / (the same without v),    r = e^w > 0

Numerator and denominator span more than a float can hold, so they travel scaled by e^-m with m the largest exponent
so far. The result does not depend on which m one takes: m needs no gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rebased.ops.backend import Backend
from rebased.ops.linear_scan import linear_scan, scan_path
from rebased.ops.polynomial.state import state_dtype

NOTHING = -1e38
"""The largest exponent of an empty past: finite, so that a difference of two is never NaN."""


class WKVState(NamedTuple):
    """The sums over the past, num = e^-max sum e^{k_i - (t-i) r} v_i and den the same without v."""

    num: Tensor  # [B, D]
    den: Tensor  # [B, D]
    max: Tensor  # [B, D]


def init_wkv_state(
    batch: int, width: int, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> WKVState:
    """The state before the first token. `dtype` is that of the inputs; the state's own is fp32, or fp64 for fp64."""
    zeros = torch.zeros(batch, width, device=device, dtype=state_dtype(dtype))
    return WKVState(zeros, zeros, torch.full_like(zeros, NOTHING))


def wkv(k: Tensor, v: Tensor, w: Tensor, u: Tensor, *, backend: Backend = "auto") -> Tensor:
    """k, v [B,T,D], w, u [D] -> [B,T,D]."""
    state = init_wkv_state(k.shape[0], k.shape[-1], device=k.device, dtype=k.dtype)
    return wkv_extend(k, v, w, u, state, backend=backend)[0]


def wkv_extend(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, state: WKVState, *, backend: Backend = "auto"
) -> tuple[Tensor, WKVState]:
    """wkv of tokens that follow a state, and the state after them. Differentiable in the state's num and den too."""
    _check(k, v, w, u, state)
    path = scan_path(backend, k)
    dtype = state_dtype(k.dtype)
    rate, u = torch.exp(w.to(dtype)), u.to(dtype)
    if path == "triton":
        from rebased.ops.rwkv_triton import scan

        return scan(k, v, rate, u, state)
    run = _loop if path == "reference" else _log_depth
    y, state = run(k.to(dtype), v.to(dtype), rate, u, state)
    return y.to(v.dtype), state


def _loop(k: Tensor, v: Tensor, rate: Tensor, u: Tensor, state: WKVState) -> tuple[Tensor, WKVState]:
    num, den, m = state
    outputs = []
    for t in range(k.shape[1]):
        outputs.append(_output(num, den, m, k[:, t], v[:, t], u))
        after = torch.maximum(m - rate, k[:, t]).detach()
        old, new = torch.exp((m - after) - rate), torch.exp(k[:, t] - after)
        num, den, m = old * num + new * v[:, t], old * den + new, after
    return torch.stack(outputs, dim=1), WKVState(num, den, m)


def _log_depth(k: Tensor, v: Tensor, rate: Tensor, u: Tensor, state: WKVState) -> tuple[Tensor, WKVState]:
    k, v = k.transpose(0, 1), v.transpose(0, 1)  # [T,B,D]
    m, sums = running_sums(k, torch.stack([v, torch.ones_like(v)], dim=-1), rate.expand(len(k), 1, -1), state)
    num = torch.cat([state.num.unsqueeze(0), sums[:-1, ..., 0]])
    den = torch.cat([state.den.unsqueeze(0), sums[:-1, ..., 1]])
    y = _output(num, den, m[:-1], k, v, u)
    return y.transpose(0, 1), WKVState(sums[-1, ..., 0], sums[-1, ..., 1], m[-1])


def running_sums(exponents: Tensor, terms: Tensor, fade: Tensor, state: WKVState) -> tuple[Tensor, Tensor]:
    """All s_t = e^-fade_t s_{t-1} + e^exponents_t terms_t from a state on, in log depth and scaled by e^-m.

    exponents [T,B,D], terms [T,B,D,2], fade [T,1,D] -> m [T+1,B,D] (before the first, and after each), s [T,B,D,2].
    """
    with torch.no_grad():
        m = torch.cat([state.max.unsqueeze(0), exponents])
        _running_max_(m, torch.cat([fade[:1], fade]))
    # In this order: m - fade was rounded when it became the next m, and what rounding took must not be lost each token.
    old, new = (m[:-1] - m[1:]) - fade, torch.exp(exponents - m[1:])
    start = torch.stack([state.num, state.den], dim=-1)
    return m, linear_scan(old.unsqueeze(-1), new.unsqueeze(-1) * terms, start)


def _output(num: Tensor, den: Tensor, m: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
    """The average over the past, m before this token, and this token with its bonus u."""
    top = torch.maximum(m, u + k).detach()
    past, present = torch.exp(m - top), torch.exp(u + k - top)
    return (past * num + present * v) / (past * den + present)


def _running_max_(m: Tensor, fade: Tensor) -> None:
    """In place: m_t <- max(m_t, m_{t-1} - fade_t), in log depth as `linear_scan.scan_`."""
    T = len(m)
    if T == 1:
        return
    even = T // 2 * 2
    seconds, rest = m[1:even:2], m[2::2]
    torch.maximum(seconds, m[0:even:2] - fade[1:even:2], out=seconds)
    _running_max_(seconds, fade[1:even:2] + fade[0:even:2])
    torch.maximum(rest, m[1 : T - 1 : 2] - fade[2::2], out=rest)


def _check(k: Tensor, v: Tensor, w: Tensor, u: Tensor, state: WKVState) -> None:
    if k.ndim != 3 or k.shape != v.shape or 0 in k.shape:
        raise ValueError(f"k and v must be [B,T,D], no axis empty; they are {list(k.shape)} and {list(v.shape)}")
    batch, _, D = k.shape
    if w.shape != (D,) or u.shape != (D,):
        raise ValueError(f"w and u must be [{D}], one number a channel; they are {list(w.shape)} and {list(u.shape)}")
    if not isinstance(state, WKVState):
        raise ValueError(f"the state must be a WKVState (init_wkv_state makes one); got {type(state).__name__}")
    if any(part.shape != (batch, D) or part.dtype != state_dtype(k.dtype) for part in state):
        raise ValueError(
            f"this state is of another shape or dtype: {[list(part.shape) for part in state]}, {state.num.dtype}; "
            f"k {list(k.shape)} in {k.dtype} needs three of {[batch, D]} in {state_dtype(k.dtype)}"
        )
